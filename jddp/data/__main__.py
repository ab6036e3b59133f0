"""`python -m jddp.data`: writes token files, and lists the examples of a step."""

import sys

from jddp.commands.data import main

if __name__ == "__main__":
    sys.exit(main())
