"""`python -m jddp.compare RUN...`: which run is better, by how much, and what differs?"""

import functools
import sys

from jddp.ground.names.plugins import run_added

main = functools.partial(run_added, "compare")

if __name__ == "__main__":
    sys.exit(main())
