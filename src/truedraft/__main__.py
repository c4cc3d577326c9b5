"""`python -m truedraft` is the command `truedraft`."""

import sys

from truedraft.cli import main

sys.exit(main())
