"""`python -m jddp.checkpoint list | verify | export`: manages checkpoints."""

import sys

from jddp.commands.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
