"""The command line of training: `python -m jddp.train [--config FILE]... [key.path=value]...`."""

import sys

from jddp.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
