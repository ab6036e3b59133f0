"""`python -m jddp.predict RUN ...`: predictions of a run for rows, images, or a text."""

import sys

from jddp.commands.predict import main

if __name__ == "__main__":
    sys.exit(main())
