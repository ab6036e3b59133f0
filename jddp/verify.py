"""`python -m jddp.verify [--config FILE]... [key.path=value]...`: do N devices equal one?"""

import sys

from jddp.commands.verify import main

if __name__ == "__main__":
    sys.exit(main())
