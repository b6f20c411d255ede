"""`python -m jgg`, the same as the command `jgg`."""

import sys

from jgg.cli import main

sys.exit(main())
