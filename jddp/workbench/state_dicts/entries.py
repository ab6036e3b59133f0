"""An entry of a table: an array of a zoo model, and the tensors that PyTorch has in its place.

table = [*dense("Dense_0", "fc"), *tracked_norm("BatchNorm_0", "bn1")]
table[0].read([weight])      # params/Dense_0/kernel, from fc.weight
table[0].write(kernel)       # [fc.weight]
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Tensors = dict[str, np.ndarray]  # by their names in a state dict, or by their paths in Flax

# The axes of a tensor, in the order in which Flax has them.
LINEAR = (1, 0)  # of (outputs, inputs)
CONV = (2, 3, 1, 0)  # of (outputs, inputs, height, width)


class Entry(NamedTuple):
    """An array and its tensors.

    Attributes:
      path: Path of the array among Flax's variables.
      names: Names of the tensors, which stand side by side along the array's last axis.
      axes: Axes of a tensor in the order of the array's; () if they are in it.
    """

    path: str
    names: tuple[str, ...]
    axes: tuple[int, ...] = ()

    def read(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The array; tensors with another number of axes stay as they are."""
        parts = [x.transpose(self.axes) if x.ndim == len(self.axes) else x for x in tensors]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def write(self, array: np.ndarray) -> list[np.ndarray]:
        """The tensors."""
        parts = np.split(array, len(self.names), axis=-1)
        back = [self.axes.index(axis) for axis in range(len(self.axes))] or range(array.ndim)
        return [np.ascontiguousarray(x.transpose(back)) for x in parts]


def dense(path: str, *names: str, axes: tuple[int, ...] = LINEAR) -> Iterator[Entry]:
    """A layer with a kernel and a bias, which PyTorch has as one layer or as several."""
    yield Entry(f"params/{path}/kernel", tuple(f"{name}.weight" for name in names), axes)
    yield Entry(f"params/{path}/bias", tuple(f"{name}.bias" for name in names))


def convolution(path: str, name: str) -> Iterator[Entry]:
    """A convolution without a bias."""
    yield Entry(f"params/{path}/kernel", (f"{name}.weight",), CONV)


def norm(path: str, name: str) -> Iterator[Entry]:
    """A layer norm."""
    yield Entry(f"params/{path}/scale", (f"{name}.weight",))
    yield Entry(f"params/{path}/bias", (f"{name}.bias",))


def tracked_norm(path: str, name: str) -> Iterator[Entry]:
    """A batch norm with its running statistics."""
    yield from norm(path, name)
    yield Entry(f"batch_stats/{path}/mean", (f"{name}.running_mean",))
    yield Entry(f"batch_stats/{path}/var", (f"{name}.running_var",))


def stack_blocks(arrays: Tensors, num_layers: int) -> Tensors:
    """The arrays of blocks 0, 1, ... along a new first axis, as `Transformer.scan_layers` has them.

    An array that some blocks lack stays where it is.
    """
    stacked = dict(arrays)
    for path in arrays:
        each = [path.replace("/block_0/", f"/block_{i}/") for i in range(num_layers)]
        if "/block_0/" in path and stacked.keys() >= {*each}:
            rows = [stacked.pop(one) for one in each]
            stacked[path.replace("/block_0/", "/blocks/")] = np.stack(rows)
    return stacked


def unstack_blocks(arrays: Tensors) -> Tensors:
    """The arrays of stacked blocks, one by one; the inverse of `stack_blocks`."""
    apart: Tensors = {}
    for path, x in arrays.items():
        if "/blocks/" in path:
            apart |= {path.replace("/blocks/", f"/block_{i}/"): row for i, row in enumerate(x)}
        else:
            apart[path] = x
    return apart
