"""``python -m weince`` is the command ``weince``."""

import sys

from weince.cli import main

sys.exit(main())
