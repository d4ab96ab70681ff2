"""What counts a step's operations is shared with the benchmarks of speed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "speed"))
