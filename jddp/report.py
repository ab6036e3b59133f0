"""`python -m jddp.report RUN`: writes a page on a run, and prints its verdict."""

import functools
import sys

from jddp.ground.names.plugins import run_added

main = functools.partial(run_added, "report")

if __name__ == "__main__":
    sys.exit(main())
