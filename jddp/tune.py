"""`python -m jddp.tune`: with which keys is a job's step fastest?"""

import functools
import sys

from jddp.ground.names.plugins import run_added

main = functools.partial(run_added, "tune")

if __name__ == "__main__":
    sys.exit(main())
