"""Names of the types of a data-parallel step.

JAX has no static type for "a tree of arrays": most names below mean the same to a type checker, and
show a reader which tree a function takes. Arrays whose shapes matter are annotated where they are
used, as in `Float[Array, "b"]`.

The module also has the base class of objects that notebooks show, and their sizes in words. It
imports no library, so that code that runs before JAX can name these types.
"""

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

# A nest of dicts, tuples and registered classes with arrays, shapes, specs or None as leaves.
PyTree = object
# A tree; a function that takes one returns another of the same structure.
Tree = TypeVar("Tree")

# The parameters of a model: they are differentiated, and updated by the optimizer.
Params = PyTree
# A tree like `Params`: gradients, and the updates that an optimizer makes of them.
Grads = PyTree
# State that a model changes in the forward pass, such as batch statistics; {} if none.
ModelState = Mapping[str, PyTree]
# The state of an optax optimizer.
OptState = PyTree
# State of a `CommHook` between steps, such as the residuals of PowerSGD; () if none.
HookState = PyTree

# The keys on the way from the root of a tree to a leaf.
Path = tuple[object, ...]

# Examples: a tree of arrays with a row for each example, on the host or on the devices.
Batch = PyTree
Batches = Iterable[Batch]
# The entry of a batch with a function of its rows. A step, an evaluation or a prediction runs the
# function on the devices, before the loss or the model sees the rows.
TRANSFORM = "transform"
# An object of JSON, or of YAML: nested values by name.
JsonObject = dict[str, Any]
# Settings or facts by name, perhaps nested and only read: a config, a manifest.
Settings = Mapping[str, object]
# Metrics by name, "loss" among them: scalars of a step, or results of an evaluation.
Metrics = Mapping[str, SupportsFloat]
# A line of metrics.jsonl: metrics, with their step and split.
Record = Mapping[str, Any]
# The names in records that are jddp's own, and that no metric of a loss may have.
RESERVED = (
    *("step", "epoch", "split"),  # Names in each record.
    # Names in the record of a step.
    *("loss", "count", "examples", "grad_norm", "skipped", "loss_scale", "spike"),
    *("learning_rate", "step_seconds", "data_wait_seconds", "host_seconds", "examples_per_second"),
    *("tokens_per_second", "model_flops_per_second", "mfu"),
    *("peak_memory_bytes", "predicted_memory_bytes", "memory_limit_bytes"),
)

# `loss_fn(model, batch)`, or one that also names `train`, `constants` or `key`: a loss for each
# example, or losses and a dict of metrics. `evaluate` and `predict` call such functions too.
LossFn = Callable[..., Any]

# An export of a notebook may give `<pre>` a proportional font, and columns would be lost. So each
# text carries its style, without a color: it is light or dark as its page.
STYLE = "font-family: monospace; white-space: pre; line-height: 1.25"
MEBIBYTE = 2**20


@runtime_checkable
class Shaped(Protocol):
    """An array of the host or of the devices, or its shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""

    @property
    def dtype(self) -> "np.dtype":
        """Dtype of the entries."""

    @property
    def size(self) -> int:
        """Number of entries."""


class Shown:
    """Base class of objects that notebooks show as their text, in columns."""

    def _repr_html_(self) -> str:
        return f'<pre style="{STYLE}">{escape(str(self))}</pre>'


def in_mebibytes(num_bytes: float) -> str:
    """A number of bytes in MiB, with three significant digits."""
    mebibytes = num_bytes / MEBIBYTE
    return f"{mebibytes:,.3f}" if mebibytes >= 1 else f"{mebibytes:.3g}"
