"""`python -m jddp.compare RUN...`: which run is better, by how much, and what differs?"""

import sys

from jddp.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
