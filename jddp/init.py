"""`python -m jddp.init DIRECTORY`: starts a project, with a config, a model, a loss and data."""

import sys

from jddp.commands.init import main

if __name__ == "__main__":
    sys.exit(main())
