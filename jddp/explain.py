"""`python -m jddp.explain [--config FILE]... [key.path=value]...`: what does a step send?"""

import sys

import jddp
from jddp.commands.explain import main

if __name__ == "__main__":
    sys.exit(main())
if __name__ == "jddp.explain":  # imported: `jddp.explain` stays the function
    sys.modules[__name__] = jddp.explain  # type: ignore[assignment]
    sys.modules[__name__].__spec__ = __spec__  # for `importlib.util.find_spec`
