"""`python -m jddp.doctor`: preflight check of a machine or of a job."""

import sys

from jddp.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
