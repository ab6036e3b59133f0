"""Digests of the model, loss and optimizer of a run, to compare when it resumes.

    digest_passes(traced, "data")      # {"model": ..., "loss": ...}, of passes that were traced
    digest_optimizer(spec, params)     # {"optimizer": ...}, of the update on one device

A digest is of the text in which JAX prints the equations, without names of functions, addresses in
memory and shardings, and of the arrays that are constants in them. Every process finds the same.

The equations of model and loss depend on the shapes of a micro-batch and on the number of replicas.
So a program has its `Form`, and a run that resumes on other devices, or with other batches, is
traced in the form of the run before.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh

from jddp.engine.calls import call
from jddp.engine.optimizer import trace_whole
from jddp.engine.planned import Traced, trace
from jddp.engine.spec import Step
from jddp.engine.state import Inputs, TrainState, name_of
from jddp.ground.typing import Batch, Leaf, Params, Path, PyTree
from jddp.modules.base import LOSS
from jddp.modules.precision import MODEL

PARTS = ("model", "loss", "optimizer")
# Names of functions, addresses, and on which devices something lies.
_UNREAD = re.compile(r"\bname=\S+|\bat 0x\w+|NamedSharding\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a program was traced.

    Attributes:
      rows: Shape and dtype of each array of a micro-batch, by path.
      num_replicas: Number of replicas that are traced together.
      num_micro_batches: Number of micro-batches of a replica.
    """

    rows: Mapping[str, list[PyTree]]
    num_replicas: int
    num_micro_batches: int

    @classmethod
    def of(cls, rows: Batch, num_replicas: int, num_micro_batches: int) -> "Form":
        """Returns the form of a micro-batch."""
        leaves = jax.tree_util.tree_leaves_with_path(rows)
        shapes = {name_of(path): [[*x.shape], str(x.dtype)] for path, x in leaves}
        return cls(shapes, num_replicas, num_micro_batches)

    def applied_to(self, rows: Batch) -> Batch:
        """Shapes of a micro-batch in this form; an array that it does not know has its rows.

        The mask of a dict comes and goes with padding: there is one if the form has one.
        """
        num_rows = {shape[0] for shape, _ in self.rows.values()}

        def one(path: Path, x: Leaf) -> jax.ShapeDtypeStruct:
            shape, dtype = self.rows.get(name_of(path), ((*num_rows, *x.shape[1:]), x.dtype))
            return jax.ShapeDtypeStruct(tuple(shape), dtype)

        if isinstance(rows, dict):
            rows = {name: x for name, x in rows.items() if name != "mask"}
            if "mask" in self.rows:
                rows["mask"] = np.zeros(0)
        return jax.tree_util.tree_map_with_path(one, rows)


@dataclasses.dataclass(frozen=True)
class Program:
    """The digests of a program, and the form in which it was traced.

    Attributes:
      digests: Digests of "model", "loss" and "optimizer".
      form: The form.
    """

    digests: Mapping[str, str]
    form: Form


def trace_as(form: Form, spec: Step, state: TrainState, part: Inputs) -> Traced:
    """Traces the passes over a micro-batch in a form.

    Args:
      form: The form.
      spec: The parts of the step.
      state: Shapes of the state of one replica.
      part: Shapes of the inputs of a micro-batch, perhaps of another form.
    """
    backward = dataclasses.replace(spec.backward, num=form.num_micro_batches)
    mesh = AbstractMesh((form.num_replicas,), (spec.axis,))
    inputs = part._replace(rows=form.applied_to(part.rows))
    return call(trace, dataclasses.replace(spec, backward=backward), mesh, state, inputs)


def digest_passes(traced: Traced, axis: str) -> dict[str, str]:
    """Returns the digests of model and loss, from traced passes over this axis."""
    forward, labels = _one_replica(traced.forward, traced.inputs)
    texts: dict[str, list[str]] = {MODEL: [], LOSS: []}
    for jaxpr in (forward, traced.backward):
        parts = _by_scope(jaxpr.eqns)
        for scope, of_scope in texts.items():
            of_scope += _text(jaxpr, parts[scope], labels)
    return {
        name: _digest(x.replace(f"'{axis}'", "axis") for x in texts[scope])
        for name, scope in (("model", MODEL), ("loss", LOSS))
    }


def digest_optimizer(spec: Step, params: Params) -> dict[str, str]:
    """Returns the digest of the optimizer, with clipping and moving average.

    Args:
      spec: The parts of the step.
      params: Shapes of the parameters.
    """
    texts = [str((spec.clip, spec.average))]
    for tx in (spec.optimizer.tx, getattr(spec.sync, "outer", None)):
        if isinstance(tx, optax.GradientTransformation):
            update, _ = trace_whole(tx, params)
            consts = dict(zip(update.jaxpr.constvars, map(_value, update.consts), strict=True))
            texts += _text(update.jaxpr, update.jaxpr.eqns, consts)
    return {"optimizer": _digest(texts)}


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256(_UNREAD.sub("", "\n".join(texts)).encode()).hexdigest()


def _one_replica(program: ClosedJaxpr, inputs: Sequence[str]) -> tuple[Jaxpr, dict[Var, str]]:
    """The program of one replica, and names of its inputs; of constants, their values."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, map(_value, program.consts), strict=True))
    known |= zip(jaxpr.invars, inputs, strict=False)
    # The map over the mesh of all replicas: maps over groups return their arguments.
    maps = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    mapped = next(eqn for eqn in maps if len(eqn.params["mesh"].axis_names) == 1)
    inner: Jaxpr = mapped.params["jaxpr"]
    given = zip(inner.invars, mapped.invars, strict=True)
    return inner, {v: known[x] for v, x in given if isinstance(x, Var) and x in known}


def _by_scope(eqns: Iterable[JaxprEqn]) -> dict[str, list[JaxprEqn]]:
    """The equations of model and loss, each in the innermost of both scopes.

    One outside of every scope, such as of a custom derivative, belongs to the part before it.
    """
    found: dict[str, list[JaxprEqn]] = {MODEL: [], LOSS: []}
    part = None
    for eqn in eqns:
        stack = eqn.source_info.name_stack.stack
        scopes = {x.name for x in stack if type(x).__name__ != "Transform"}
        part = next((x for x in found if x in scopes), None) if scopes else part
        if part is not None:
            found[part].append(eqn)
    return found


def _text(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], labels: Mapping[Var, str]) -> list[str]:
    """Some equations of a program, the labels of their inputs, and the constants inside them."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
    inputs = [v for v in read if v not in made]
    own = jaxpr.replace(constvars=[], invars=inputs, outvars=[], eqns=[*eqns])
    labeled = [labels.get(v, "") for v in inputs]
    return [own.pretty_print(use_color=False), *labeled, *map(_value, _constants(eqns))]


def _constants(eqns: Iterable[JaxprEqn]) -> Iterator[Leaf]:
    """The arrays that are constants of programs inside equations."""
    for eqn in eqns:
        params = [*eqn.params.values()]
        for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, ClosedJaxpr)):
            if isinstance(x, ClosedJaxpr):
                yield from x.consts
            if isinstance(x, ClosedJaxpr | Jaxpr):
                yield from _constants(x.eqns)


def _value(x: Leaf) -> str:
    """Type and digest of a constant; the type alone where other processes have parts of it."""
    kind = str(jax.typeof(x))
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            return kind
        x = x.addressable_data(0)
    return f"{kind} {hashlib.sha256(np.asarray(x).tobytes()).hexdigest()}"
