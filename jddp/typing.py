"""The types that a data-parallel step passes around, by the names that the field has for them.

JAX has no static type for "a tree of arrays": most names below mean the same to a type checker, and
tell a reader which tree a function takes. Arrays whose shapes matter are annotated where they are
used, as in `Float[Array, "b"]`.

This room imports no library, so that code that runs before JAX can name these types.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

# A nest of dicts, tuples and registered classes with arrays, shapes, specs or None as leaves.
PyTree = Any

# The parameters of a model: what is differentiated and what the optimizer moves.
Params = PyTree
# A tree like `Params`: gradients, and the updates that an optimizer makes of them.
Grads = PyTree
# What a model changes in the forward pass, such as statistics of batch norm; {} if nothing.
ModelState = PyTree
# The state of an optax optimizer.
OptState = PyTree
# What a `CommHook` keeps from step to step, such as the residuals of PowerSGD; () for nothing.
HookState = PyTree

# Examples: a tree of arrays that have one row for each, on the host or on the devices.
Batch = PyTree
Batches = Iterable[Batch]
# Means by name, "loss" among them: scalars of a step; of an evaluation what each metric computes.
Metrics = dict[str, Any]
# A line of metrics.jsonl: metrics, beside what says of which step and split they are.
Record = Mapping[str, Any]

# `loss_fn(model, batch)`, or one that also names `train` or constants: a loss for each example, or
# losses and a dict of metrics. Also what `evaluate` and `predict` call in its place.
LossFn = Callable[..., Any]
