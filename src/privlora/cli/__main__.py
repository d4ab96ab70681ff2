"""``python -m privlora.cli``."""

import sys

from privlora.cli import main

sys.exit(main())
