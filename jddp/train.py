"""The command line of training: `python -m jddp.train [--config FILE]... [key.path=value]...`."""

import sys

import jddp
from jddp.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
if __name__ == "jddp.train":  # imported: `jddp.train` stays the function
    sys.modules[__name__] = jddp.train  # type: ignore[assignment]
    sys.modules[__name__].__spec__ = __spec__  # for `importlib.util.find_spec`
