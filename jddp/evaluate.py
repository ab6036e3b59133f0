"""`python -m jddp.evaluate RUN [key.path=value]...`: evaluates a run again."""

import sys

from jddp.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
