"""`python -m manyhands` is the command `manyhands`."""

import sys

from manyhands.cli import main

if __name__ == "__main__":
    sys.exit(main())
