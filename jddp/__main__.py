"""`python -m jddp` is `python -m jddp.train`."""

import sys

from jddp.train import main

if __name__ == "__main__":
    sys.exit(main())
