"""`python -m jddp.explain [--config FILE]... [key.path=value]...`: what does a step send?"""

import sys

from jddp.commands.explain import main

if __name__ == "__main__":
    sys.exit(main())
