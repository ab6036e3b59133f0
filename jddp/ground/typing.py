"""Names of the types of a data-parallel step.

JAX has no static type for "a tree of arrays": most names below mean the same to a type checker, and
show a reader which tree a function takes. Arrays whose shapes matter are annotated where they are
used, as in `Float[Array, "b"]`.

The module also has the base class of objects that notebooks show. It imports no library, so that
code that runs before JAX can name these types.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    # The slowest process of a job.
    *("slowest_process", "slowest_host", "slowest_phase", "slowest_ratio"),
    *("tokens_per_second", "model_flops_per_second", "mfu"),
    *("peak_memory_bytes", "predicted_memory_bytes", "memory_limit_bytes"),
)

# `loss_fn(model, batch)`, or one that also names `train`, `constants` or `key`: a loss for each
# example, or losses and a dict of metrics. `evaluate` and `predict` call such functions too.
LossFn = Callable[..., Any]

# Tables and text in notebooks. An export may give `<pre>` a proportional font, and columns would be
# lost. Notebooks stripe and center tables, each in its own way. So each element carries its style:
# the style sheets of a page do not override it. It has no color: text is light or dark as its page.
STYLE = "font-family: monospace; white-space: pre; line-height: 1.25"
_BOX = "overflow: auto; max-height: 36em; margin-bottom: .6em"
_CELL = "padding: .15em 1em .15em 0; vertical-align: top; background: none; max-width: 40em"
_NUMBER = re.compile(r"-?[\d,.]+(e[-+]?\d+)?( ?%)?|unknown|-|")


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


@dataclass(frozen=True)
class TextTable:
    """A table of text; a column of numbers is aligned at the right.

    Attributes:
      title: Text above it.
      rows: Rows of cells.
      head: Heads of the columns; () for none.
      notes: Sentences below it.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    head: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """The table as HTML."""
        aligned = [_alignment(column) for column in zip(*self.rows, strict=True)]
        head = _row("th", self.head, aligned) if self.rows and self.head else ""
        rows = "".join(_row("td", row, aligned) for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div style="{_BOX}"><b>{escape(self.title)}</b>'
            f'<table style="border-collapse: collapse; margin: 0">{head}{rows}</table>{notes}</div>'
        )


def _alignment(column: Iterable[str]) -> str:
    return "right" if all(_NUMBER.fullmatch(cell) for cell in column) else "left"


def _row(tag: str, cells: Sequence[str], aligned: Sequence[str]) -> str:
    made = (
        f'<{tag} style="{_CELL}; text-align: {side}">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, aligned, strict=True)
    )
    return f'<tr style="border-bottom: 1px solid #8884; background: none">{"".join(made)}</tr>'


class Shown:
    """Base class of objects that notebooks show as tables, or as their text if they have none.

    class Plan(Shown):              # a notebook shows its `__repr__` or `__str__`,
        def _tables(self):          # unless it has tables
            yield TextTable("a plan", [("0", "1.25")], ["bucket", "MiB"])
    """

    def _tables(self) -> Iterable[TextTable]:
        """The tables that a notebook shows; by default none."""
        return ()

    def _repr_html_(self) -> str:
        text = f'<pre style="{STYLE}">{escape(str(self))}</pre>'
        return "".join(map(str, self._tables())) or text
