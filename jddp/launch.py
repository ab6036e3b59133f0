"""`python -m jddp.launch --num-processes N ... -m package.module`: starts a job."""

import sys

import jddp
from jddp.commands.launch import main

if __name__ == "__main__":
    sys.exit(main())
if __name__ == "jddp.launch":  # imported: `jddp.launch` stays the function
    sys.modules[__name__] = jddp.launch  # type: ignore[assignment]
    sys.modules[__name__].__spec__ = __spec__  # for `importlib.util.find_spec`
