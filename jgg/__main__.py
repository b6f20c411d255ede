"""`python -m jgg`, the same as the command `jgg`."""

import sys

from jgg.cli import main

if __name__ == "__main__":
    sys.exit(main())
