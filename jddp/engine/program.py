"""Digests of the model, loss and optimizer of a run, to compare when it resumes.

    digest_passes(traced, "data")      # {"model": ..., "loss": ...}, of passes that were traced
    digest_step(step, spec, None)      # {"optimizer": ...}, of a step that was traced

The digests of model and loss are those of one micro-batch on one replica, whose equations depend on
its shapes and on the number of replicas. So a program has its `Form`, and a run that resumes on
other devices, or with other batches, is traced in the form of the run before.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from jddp.engine.canonical import Reader
from jddp.engine.protocols import OPTIMIZER
from jddp.engine.spec import Step
from jddp.engine.state import name_of
from jddp.engine.step import Traced
from jddp.modules.base import LOSS
from jddp.modules.precision import MODEL
from jddp.typing import Batch, Leaf, Path

PARTS = ("model", "loss", "optimizer")


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a program was traced.

    Attributes:
      rows: Shape and dtype of each array of a micro-batch, by path.
      num_replicas: Number of replicas that are traced together.
      num_micro_batches: Number of micro-batches of a replica.
    """

    rows: Mapping[str, tuple[tuple[int, ...], str]]
    num_replicas: int
    num_micro_batches: int

    def applied_to(self, rows: Batch) -> Batch:
        """Shapes of a micro-batch in this form; an array that it does not know has its rows.

        A mask of a dict comes and goes with padding, which is that of the form too.
        """
        num_rows = {shape[0] for shape, _ in self.rows.values()}

        def one(path: Path, x: Leaf) -> jax.ShapeDtypeStruct:
            known = self.rows.get(name_of(path), ((*num_rows, *x.shape[1:]), x.dtype))
            return jax.ShapeDtypeStruct(tuple(known[0]), known[1])

        shapes = jax.tree_util.tree_map_with_path(one, rows)
        if isinstance(rows, dict):
            shapes = {name: x for name, x in shapes.items() if name != "mask" or name in self.rows}
        if isinstance(rows, dict) and "mask" in self.rows:
            shape, dtype = self.rows["mask"]
            shapes["mask"] = jax.ShapeDtypeStruct(tuple(shape), dtype)
        return shapes


@dataclasses.dataclass(frozen=True)
class Program:
    """The digests of a program, and the form in which it was traced.

    Attributes:
      digests: Digests of "model", "loss" and "optimizer".
      form: The form.
    """

    digests: Mapping[str, str]
    form: Form


def form_of(rows: Batch, num_replicas: int, num_micro_batches: int) -> Form:
    """Returns the form of a micro-batch."""
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    shapes = {name_of(path): (tuple(x.shape), str(x.dtype)) for path, x in leaves}
    return Form(shapes, num_replicas, num_micro_batches)


def digest_passes(traced: Traced, axis: str) -> dict[str, str]:
    """Returns the digests of model and loss, from traced passes over this axis."""
    reader = Reader((LOSS, MODEL), axis=axis)
    inside, labels = _inside(reader, traced.forward, traced.inputs)
    # Results of the model are those that the loss takes, and the backward pass what it leaves.
    reader.read(inside, labels, with_results=False)
    # The backward pass reads what the forward pass has left: variables of it, by other names.
    num = len(traced.backward.constvars)
    left = inside.outvars[len(inside.outvars) - num :]
    reader.read(
        traced.backward, labels, same=dict(zip(traced.backward.constvars, left, strict=True))
    )
    found = reader.digests()
    return {"model": found.get(MODEL, ""), "loss": found.get(LOSS, "")}


def digest_step(step: ClosedJaxpr, spec: Step, whole: ClosedJaxpr | None) -> dict[str, str]:
    """Returns the digest of the optimizer, with clipping and moving average, from a traced step.

    Without shapes: those of parameters are compared with those of a checkpoint anyway, and a
    sharded optimizer has other ones on other devices.

    Args:
      step: The traced step.
      spec: The parts of the step.
      whole: The update on one device, where the step has other equations; else None.
    """
    reader = Reader((OPTIMIZER,), axis=spec.axis, with_shapes=False, follows=False)
    equations = _inside(reader, step) if whole is None else (whole.jaxpr, {})
    reader.read(*equations, with_results=False)
    reader.add(OPTIMIZER, (spec.clip, spec.average))
    return {"optimizer": reader.digests()[OPTIMIZER]}


def _inside(
    reader: Reader, program: ClosedJaxpr, inputs: Sequence[str] = ()
) -> tuple[Jaxpr, dict[Var, str]]:
    """The program of one replica, and names of its inputs; of constants, their values."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, map(reader.value, program.consts), strict=True))
    known |= zip(jaxpr.invars, inputs, strict=False)
    # Over the mesh of all replicas: those of groups return what they are given.
    maps = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    mapped = next(eqn for eqn in maps if len(eqn.params["mesh"].axis_names) == 1)
    inner: Jaxpr = mapped.params["jaxpr"]
    given = zip(inner.invars, mapped.invars, strict=True)
    return inner, {v: known[x] for v, x in given if isinstance(x, Var) and x in known}
