"""`python -m jddp.tune`: with which keys is a job's step fastest?"""

import sys

from jddp.commands.tune import main

if __name__ == "__main__":
    sys.exit(main())
