"""``python -m privlora``, and what torchrun -m privlora starts in each process."""

import sys

from privlora.cli import main

sys.exit(main())
