"""`python -m jddp.data tokenize` writes token files."""

import sys

from jddp.commands.data import main

if __name__ == "__main__":
    sys.exit(main())
