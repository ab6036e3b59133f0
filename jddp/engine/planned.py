"""The traced passes of a step for rows of one form: the plan of its buckets, facts, and digests.

    plans = Plans(spec, mesh, rows)
    planned = plans.of(state, inputs)        # traces once for each form, computes nothing
    planned.plan, planned.sums, planned.uses_rng
    digest_passes(planned.traced, "data")    # {"model": ..., "loss": ...}
    digest_optimizer(spec, params)           # {"optimizer": ...}, of the update on one device

Rows of another form may use other parameters, so they have other buckets too.

Digests are compared when a run resumes. A digest is of the text in which JAX prints the equations,
without names of functions, addresses in memory and shardings, and of the arrays that are constants
in them. Every process finds the same. The equations of model and loss depend on the shapes of a
micro-batch and on the number of replicas: they are compared in one form alone.
"""

import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jddp.engine.calls import call
from jddp.engine.mesh import RowSplit, over_replicas
from jddp.engine.micro_batches import MicroBatches
from jddp.engine.optimizer import trace_whole
from jddp.engine.state import Inputs, TrainState, form_key, name_of, shapes_of
from jddp.engine.step import Step, TraceLoss
from jddp.ground.errors import ConfigError
from jddp.ground.jaxprs import has_random_bits
from jddp.ground.typing import Batch, JsonObject, ModelState, Params, PyTree
from jddp.modules.base import LOSS
from jddp.modules.metrics import Sums, weights_in
from jddp.modules.precision import MODEL
from jddp.reduce.plan import BucketPlan


@dataclasses.dataclass(frozen=True)
class Traced:
    """Facts from the traced passes of one replica.

    Attributes:
      ready: Order in which gradients are finished, `Backward.ready`.
      sums: Shapes of the sums of loss and metrics.
      uses_rng: Whether one of the passes uses random numbers.
      has_batch_statistics: Whether the model keeps statistics of a batch norm; False where a step
        has but one micro-batch, since then it does not matter.
      forward: Equations of the forward pass of all replicas. Its results are the sums, the other
        state of the model, and the constants of the backward pass.
      backward: Equations of the backward pass of one replica.
      inputs: Paths of the inputs of the forward pass.
    """

    ready: tuple[int | None, ...]
    sums: Sums
    uses_rng: bool
    has_batch_statistics: bool
    forward: ClosedJaxpr
    backward: Jaxpr
    inputs: tuple[str, ...]


def trace(
    step: Step,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    state: TrainState,
    inputs: Inputs,
) -> Traced:
    """Traces a replica's forward and backward pass. Computes nothing.

    Args:
      step: The parts of the step.
      mesh: The mesh, for the size of its axis.
      state: Shapes of one replica's state.
      inputs: Shapes of the rows of one micro-batch, and of constants.
    """
    traced = []

    def replica(state: TrainState, inputs: Inputs) -> tuple[Sums, ModelState, list[jax.Array]]:
        backward, sums, model_state = step.backward.trace(state, inputs)
        traced.append(backward)
        return sums, model_state, backward.traced.consts

    # Mapped as the step is: a model may name the axis of the replicas. Nothing is reduced, so specs
    # that are not true do no harm.
    program = over_replicas(replica, mesh, jax.P(), jax.P())
    forward, results = jax.make_jaxpr(program, return_shape=True)(state, inputs)
    (backward,) = traced
    step.replicas.check(forward.jaxpr)
    # Looks at both passes: a custom backward pass may use random numbers where the forward pass
    # does not.
    draws = has_random_bits(forward.jaxpr) or has_random_bits(backward.traced.jaxpr)
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path((state, inputs))]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.model_state)]
    return Traced(
        ready=backward.ready,
        sums=results[0],
        uses_rng=draws,
        has_batch_statistics=step.backward.num > 1 and any(map(step.model.is_statistic, paths)),
        forward=forward,
        backward=backward.traced.jaxpr,
        inputs=tuple(names),
    )


def trace_loss(
    passes: MicroBatches,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    state: TrainState,
    inputs: Inputs,
) -> Jaxpr:
    """Traces the loss of a micro-batch of one replica, whose inputs are the parameters.

    Args:
      passes: The forward pass.
      mesh: The mesh, for the size of its axis.
      state: Shapes of one replica's state.
      inputs: Shapes of the rows, and of constants.
    """
    traced: list[ClosedJaxpr] = []

    def replica(state: TrainState, inputs: Inputs) -> None:
        batch = inputs.rows, state.key, inputs.constants

        def loss(params: Params) -> PyTree:
            return passes.forward(params, state.model_state, *batch)

        traced.append(jax.make_jaxpr(loss)(state.params))

    jax.eval_shape(over_replicas(replica, mesh, jax.P(), jax.P()), state, inputs)
    return traced[0].jaxpr


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of a step for rows of one form.

    Attributes:
      plan: The buckets.
      traced: Facts from the traced passes; None where there were no rows to trace with.
    """

    plan: BucketPlan
    traced: Traced | None = None

    @property
    def sums(self) -> Sums:
        """Shapes of the sums of loss and metrics; none without rows."""
        return {} if self.traced is None else self.traced.sums

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the loss and metrics that are scalars."""
        return tuple(name for name, x in self.sums.items() if x.is_scalar)

    @property
    def uses_rng(self) -> bool:
        """Whether model or loss use random numbers, such as dropout's.

        A hook's or optimizer's random numbers are equal on every replica, or sent as gradients are.
        """
        return self.traced is not None and self.traced.uses_rng


class Plans:
    """The plans of one spec on one mesh, for each form of a micro-batch.

    Args:
      spec: The parts of the step.
      mesh: The devices.
      rows: Division of rows into micro-batches.
    """

    def __init__(self, spec: Step, mesh: jax.sharding.Mesh, rows: RowSplit) -> None:
        self._spec = spec
        self._mesh = mesh
        self._rows = rows
        self._planned: dict[Hashable, Planned] = {}

    def of(self, state: TrainState, inputs: Inputs) -> Planned:
        """The plan for the state of one replica and inputs of this process, or their shapes.

        Raises:
          ConfigError: If no gradient reaches a parameter, and unused_parameters is "error"; if none
            reaches any; or if state of the model must be the same on all replicas, and LocalSteps
            lets it differ.
        """
        spec = self._spec
        spec.sync.check(spec.model.whole({}, state.model_state)[1], spec.model.keeps_own)
        if inputs.rows is None:
            return Planned(self._noted(spec.reducer.plan(state.params), state))
        # Plans are kept by the form of one micro-batch: the same micro-batch in a larger batch has
        # the same buckets, and is not traced again.
        part = self.micro_batch(inputs)
        form = form_key(part)
        if form not in self._planned:
            traced = call(trace, spec, self._mesh, shapes_of(state), part)
            if not self._planned:
                for warning in _warnings(inputs.rows, traced, spec.backward.num):
                    logging.getLogger("jddp").warning(warning)
            # Refused whatever `unused_parameters` is: that option is about single parameters.
            if traced.ready and all(ready is None for ready in traced.ready):
                raise ConfigError(
                    "No gradient reaches any parameter: the loss does not depend on them. Return "
                    "the loss as JAX computes it from the model's outputs, without stop_gradient, "
                    "numpy or float()."
                )
            plan = spec.reducer.plan(state.params, traced.ready)
            loss = functools.partial(call, trace_loss, spec.backward, self._mesh, state, part)
            plan = self._noted(plan, state, loss)
            self._planned[form] = Planned(plan, traced)
        # Checked for each form of rows: another batch may leave other parameters unused.
        spec.optimizer.check_used(self._planned[form].plan)
        return self._planned[form]

    def micro_batch(self, inputs: Inputs) -> Inputs:
        """Shapes of the inputs of one micro-batch."""
        num_rows = self._rows.of_micro_batch(inputs.rows)
        rows, constants, _ = shapes_of(inputs)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), rows)
        return Inputs(rows, constants)

    def _noted(self, plan: BucketPlan, state: TrainState, loss: TraceLoss = None) -> BucketPlan:
        """The plan, with notes on when buckets are sent, and on parameters that never are."""
        plan = plan.noted(*self._spec.model.notes(state.model_state))
        plan = self._spec.placement.note(plan, state.params, loss)
        return self._spec.sync.note(self._spec.backward.note(plan))


def _warnings(batch: Batch, traced: Traced, num_micro_batches: int) -> Iterator[str]:
    if (names := weights_in(batch)) and traced.sums["loss"].is_scalar:
        yield (
            f"The loss is a scalar, and the batch has {names[0]!r}: replicas are weighted equally, "
            "whatever the weights of their rows. If the loss is sum(l * w) / sum(w), return "
            "jddp.Mean(l * w, w) instead."
        )
    if traced.has_batch_statistics:
        yield (
            f"accumulate_steps={num_micro_batches}: batch norm takes the statistics of each "
            "micro-batch, so this step differs from a step on the whole batch at once."
        )


PARTS = ("model", "loss", "optimizer")
# Names of functions, addresses in memory, and shardings.
_UNREAD = re.compile(r"\bname=\S+|\bat 0x\w+|NamedSharding\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


class Program(NamedTuple):
    """The digests of a program, and the form in which it was traced.

    Attributes:
      digests: Digests of "model", "loss" and "optimizer".
      form: Shape and dtype of each array of a micro-batch, and the numbers of replicas and of
        micro-batches. The digest of the optimizer does not depend on it.
    """

    digests: Mapping[str, str]
    form: JsonObject


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
    """The program of one replica, and names of its inputs; for constants, their values."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, map(_value, program.consts), strict=True))
    known |= zip(jaxpr.invars, inputs, strict=False)
    # Takes the map over the mesh of all replicas: maps over groups return their arguments.
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


def _constants(eqns: Iterable[JaxprEqn]) -> Iterator[jax.typing.ArrayLike]:
    """The arrays that are constants of programs inside equations."""
    for eqn in eqns:
        params = [*eqn.params.values()]
        for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, ClosedJaxpr)):
            if isinstance(x, ClosedJaxpr):
                yield from x.consts
            if isinstance(x, ClosedJaxpr | Jaxpr):
                yield from _constants(x.eqns)


def _value(x: jax.typing.ArrayLike) -> str:
    """Type and digest of a constant; the type alone where other processes have parts of it."""
    kind = str(jax.typeof(x))
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            return kind
        x = x.addressable_data(0)
    return f"{kind} {hashlib.sha256(np.asarray(x).tobytes()).hexdigest()}"
