"""Atomic adds on NVIDIA's GPUs, which some versions of jaxlib compile to slow loops.

jaxlib 0.10.2 to 0.11.0 compile a scatter that adds float32, such as the gradient of an embedding,
to loops of compare-and-swap, up to 450 times slower where rows collide. An option of LLVM restores
atomics: https://github.com/openxla/xla/issues/46225, https://github.com/jax-ml/jax/issues/38806.
"""

import re
from collections.abc import Mapping, MutableMapping
from importlib.metadata import version

from jddp.distributed.gpus import may_use_gpus, num_nvidia

_NAME = "xla_backend_extra_options"  # cannot be set for one program, only for the process
FLAG = f"--{_NAME}=-nvptx-allow-ftz-atomics"
_FIRST, _LAST = (0, 10, 2), (0, 11, 0)


def lacks_atomics(environ: Mapping[str, str]) -> bool:
    """Whether JAX will compile such loops: by its version, and unless the user has set the flag."""
    numbers = tuple(map(int, re.findall(r"\d+", version("jaxlib"))[:3]))
    return _FIRST <= numbers <= _LAST and _NAME not in environ.get("XLA_FLAGS", "")


def add_flag(environ: MutableMapping[str, str]) -> None:
    """Adds the flag where there are GPUs that need it, before JAX is started."""
    if num_nvidia() and may_use_gpus(environ.get("JAX_PLATFORMS")) and lacks_atomics(environ):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {FLAG}".lstrip()
