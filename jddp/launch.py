"""`python -m jddp.launch --num-processes N ... -m package.module`: starts a job."""

import sys

from jddp.commands.launch import main

if __name__ == "__main__":
    sys.exit(main())
