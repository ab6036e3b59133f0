"""`python -m jddp.report RUN`: writes a page on a run, and prints its verdict."""

import sys

from jddp.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
