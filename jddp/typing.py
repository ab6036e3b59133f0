"""Names of the types of a data-parallel step.

JAX has no static type for "a tree of arrays": most names below mean the same to a type checker, and
show a reader which tree a function takes. Arrays whose shapes matter are annotated where they are
used, as in `Float[Array, "b"]`.

This module imports no library, so that code that runs before JAX can name these types.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

# A nest of dicts, tuples and registered classes with arrays, shapes, specs or None as leaves.
PyTree = Any
# One leaf of a tree: an array of the host or of the devices, or its shape and dtype.
Leaf = PyTree

# The parameters of a model, which are differentiated and updated by the optimizer.
Params = PyTree
# A tree like `Params`: gradients, and the updates that an optimizer makes of them.
Grads = PyTree
# State that a model changes in the forward pass, such as batch statistics; {} if none.
ModelState = PyTree
# The state of an optax optimizer.
OptState = PyTree
# State of a `CommHook` between steps, such as the residuals of PowerSGD; () if none.
HookState = PyTree

# The keys on the way from the root of a tree to a leaf.
Path = tuple[Any, ...]

# Examples: a tree of arrays that have one row for each, on the host or on the devices.
Batch = PyTree
Batches = Iterable[Batch]
# The entry of a batch with a function of its rows, which the step runs on the devices before the
# loss, or an evaluation or a prediction, sees them.
TRANSFORM = "transform"
# An object of JSON, or of YAML: nested values by name.
JsonObject = dict[str, Any]
# Settings or facts by name, perhaps nested, which are only read: a config, a manifest.
Settings = Mapping[str, Any]
# Metrics by name, "loss" among them: scalars of a step, or results of an evaluation.
Metrics = dict[str, Any]
# A line of metrics.jsonl: metrics, with their step and split.
Record = Mapping[str, Any]
# The names in records that are jddp's own, and that no metric of a loss may have.
RESERVED = (
    *("step", "epoch", "split"),  # of each record
    *("loss", "count", "examples", "grad_norm", "skipped", "loss_scale", "spike"),  # of steps
    *("learning_rate", "step_seconds", "data_wait_seconds", "host_seconds", "examples_per_second"),
    *("slowest_process", "slowest_host", "slowest_phase", "slowest_ratio"),  # of a job
    *("tokens_per_second", "model_flops_per_second", "mfu"),
    *("peak_memory_bytes", "predicted_memory_bytes", "memory_limit_bytes"),
    "exposed_communication",
)

# `loss_fn(model, batch)`, or one that also names `train`, `constants` or `key`: a loss for each
# example, or losses and a dict of metrics. Also what `evaluate` and `predict` call in its place.
LossFn = Callable[..., Any]
