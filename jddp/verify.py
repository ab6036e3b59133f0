"""`python -m jddp.verify [--config FILE]... [key.path=value]...`: do N devices equal one?"""

import sys

import jddp
from jddp.commands.verify import main

if __name__ == "__main__":
    sys.exit(main())
if __name__ == "jddp.verify":  # imported: `jddp.verify` stays the function
    sys.modules[__name__] = jddp.verify  # type: ignore[assignment]
    sys.modules[__name__].__spec__ = __spec__  # for `importlib.util.find_spec`
