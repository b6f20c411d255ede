"""`python -m jgg`, the same as the command `jgg`."""

import sys

from _jgg_command import main

sys.exit(main())
