"""Makes the first state of training: by the model from a seed, or from given values.

    state, planned, loaded = make_first(steps, seed, inputs)       # the same on every device

All processes start with the same state: new values are made on every device from the same seed and
rows, and given values are replicated.
"""

import dataclasses
import functools
import logging
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jddp.engine.calls import call, connect, from_process
from jddp.engine.compiled import CompiledSteps
from jddp.engine.mesh import (
    AXIS_HERE,
    HostOrDevice,
    over_replicas,
    platform,
    put,
    replicate,
    sharded,
    sharding_of,
    shardings,
    with_shardings,
)
from jddp.engine.planned import Planned
from jddp.engine.state import CommState, Inputs, Layout, Replicated, TrainState, by_path, stack_rows
from jddp.engine.step import Step
from jddp.ground.errors import ConfigError, UsageError
from jddp.ground.typing import ModelState, Params, PyTree, Shaped, Tree
from jddp.modules.base import freeze, name_arguments, thaw
from jddp.reduce.reducer import unless_set
from jddp.reduce.shards import Division


def make_first(
    steps: CompiledSteps,
    seed: int,
    inputs: Inputs,
    params: Params = None,
    *,
    partial: bool = False,
    casts: bool = False,
) -> tuple[TrainState, Planned, "Loaded | None"]:
    """Makes a state and the plan of its rows; also reports on given values, if any were compared.

    Args:
      steps: Steps that plan for the rows, on the mesh of the state.
      seed: Seed of the base PRNG key.
      inputs: Example rows of this process, and constants.
      params: Values to start from, as `jddp.DataParallel.init` has them, but for a path.
      partial: Whether the model keeps its own values where these do not fit.
      casts: Whether floating values take the dtypes of the model, as values of files do.
    """
    is_whole = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if not (is_whole and 0 <= operator.index(seed) < 2**32):
        raise ConfigError(f"seed {seed!r} is no whole number from 0 to {2**32 - 1}. Give one.")
    spec, mesh = steps.spec, steps.mesh
    connect(mesh, spec.placement.groups)
    values, loaded = _values(steps, seed, inputs, params, partial=partial, casts=casts)
    # Takes the rows of process 0, so that all processes start with the same state.
    example = inputs._replace(rows=from_process(0, steps.example(inputs.rows, values)))
    state = call(steps.init, np.uint32(seed), example, *put_given(spec, mesh, values))
    spec.model.check_kinds(state.model_state)
    planned = steps.plans.of(state, inputs)
    comm_state = steps.comm_state(planned, state.comm_state.outer)
    state = state.replace(comm_state=replicate(comm_state, mesh))
    layouts = steps.layouts(state)
    state = with_shardings(state, layouts, mesh)
    state = stack_rows(state, layouts, sharded(mesh), steps.rows.num_replicas)
    return state, planned, loaded


def _values(
    steps: CompiledSteps, seed: int, inputs: Inputs, params: Params, *, partial: bool, casts: bool
) -> tuple[tuple[Params, ModelState | None], "Loaded | None"]:
    """The given values, checked against the model's own if these are known."""
    model = steps.spec.model
    values, state = (model.values or (None, None)) if params is None else model.split(params)
    if params is None or (model.values is None and inputs.rows is None):
        if partial:
            raise UsageError("init(partial=True) needs params=, and for a Linen model batch=.")
        return (values, state), None
    if model.values is not None:
        own, own_state = model.values
    elif partial:
        made, *_ = make_first(steps, seed, inputs)
        own, own_state = model.whole(*steps.merged((made.params, made.model_state)))
    else:  # Their shapes are enough.
        made = steps.shapes(inputs)
        merged = jax.eval_shape(steps.merged, (made.params, made.model_state))
        own, own_state = model.whole(*merged)
    values, loaded = fit_weights(values, own, partial=partial)
    if state is not None:
        state, others = fit_weights(state, own_state, partial=partial)
        loaded += others
    if partial:
        logging.getLogger("jddp").warning("params=: %s", loaded)
    return (jax.tree.map(_like, values, own) if casts else values, state), loaded


def _like(x: HostOrDevice, wanted: Shaped) -> HostOrDevice:
    """A floating array in another floating dtype; other arrays unchanged."""
    both = (jax.numpy.issubdtype(v.dtype, np.floating) for v in (x, wanted))
    return np.asanyarray(x).astype(wanted.dtype, copy=False) if all(both) else x


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The weights that a model took from a file or tree, by path.

    Attributes:
      taken: Weights that the model took.
      made: Weights of the model that were not given, or given in another shape.
      unused: Given weights that the model does not have.
    """

    taken: tuple[str, ...]
    made: tuple[str, ...]
    unused: tuple[str, ...]

    def __add__(self, other: "Loaded") -> "Loaded":
        """The weights of both trees."""
        return Loaded(self.taken + other.taken, self.made + other.made, self.unused + other.unused)

    def __str__(self) -> str:
        """One to three sentences."""
        text = f"{len(self.taken)} of {len(self.taken) + len(self.made)} arrays were loaded."
        if self.made:
            text += f" Initialized: {', '.join(self.made)}."
        if self.unused:
            text += f" Not used: {', '.join(self.unused)}."
        return text


class Misfit(ConfigError):
    """Weights that do not fit a model.

    Args:
      where: Number of places where they differ, and the first of them.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            f"params= does not fit the model at {where}. With partial=True the model keeps its own "
            "there."
        )
        self.where = where


def fit_weights(given: Tree, wanted: Tree, *, partial: bool) -> tuple[Tree, Loaded]:
    """Replaces each leaf of a model by the given array at the same path.

    Args:
      given: Tree of arrays.
      wanted: Tree of the model; with values if `partial`.
      partial: Whether the model keeps its own leaf if none is given, or one of another shape.

    Returns:
      A tree of the structure of `wanted`, and the use of the given weights.

    Raises:
      Misfit: If the two differ in a path or shape, and it is not `partial`.
    """
    found, own = by_path(given), by_path(wanted)
    there, here = ({name: np.shape(x) for name, x in tree.items()} for tree in (found, own))
    taken = [name for name, shape in here.items() if there.get(name) == shape]
    unused = [name for name in found if name not in own]
    missing = [name for name in own if name not in taken]
    if (differ := sorted({*missing, *unused})) and not partial:
        name = differ[0]
        raise Misfit(
            f"{len(differ)} places; the first is {name!r}: got {there.get(name, 'nothing')}, the "
            f"model has {here.get(name, 'nothing')}"
        )
    values = [found[name] if name in taken else x for name, x in own.items()]
    made = [f"{n} ({there[n]} given, {here[n]} here)" if n in there else n for n in missing]
    loaded = Loaded(tuple(taken), tuple(made), tuple(unused))
    return jax.tree.unflatten(jax.tree.structure(wanted), values), loaded


def make_init(step: Step, mesh: jax.sharding.Mesh) -> jax.stages.Wrapped:
    """Returns `init(seed, inputs, params, model_state)`, run on every device of the mesh.

    It takes the seed of the base key; example rows, or None where the model has its values, with
    constants; and given parameters and other state, each None to make it.
    """

    def replica(
        seed: Array, inputs: Inputs, params: Params, model_state: ModelState | None
    ) -> tuple[Params, TrainState]:
        # Values are made on every device, not made on one and sent: equal programs and seeds give
        # equal bits. PyTorch DDP broadcasts the parameters of rank 0.
        key = jax.random.key(seed)
        if params is None or (model_state is None and inputs.rows is not None):
            loss_fn = name_arguments(step.backward.loss_fn, inputs.constants, key)
            made, made_state = step.model.init(loss_fn, key, inputs.rows)
            params = made if params is None else params
            model_state = made_state if model_state is None else model_state
        params, model_state = freeze(params, model_state or {}, step.model.frozen)
        state = TrainState(
            step=jnp.int32(0),
            params=params,
            ema_params=None,
            model_state=model_state,
            opt_state=(),
            comm_state=CommState(outer=step.sync.init(params)),  # hook state needs the buckets
            skipped=jnp.int32(0),
            key=key,
        )
        # Given values are kept, and an average begins with them: each leaf needs its own buffer.
        state = jax.tree.map(jnp.copy, state)
        return state.params, state.replace(params=())

    def init(
        seed: Array, inputs: Inputs, params: Params, model_state: ModelState | None
    ) -> TrainState:
        parts = shardings(given_layouts(step, params), mesh)
        trained = jax.P() if params is None else freeze(parts, {}, step.model.frozen)[0]
        enter, leave = (jax.P(), jax.P(), parts, jax.P()), (trained, jax.P())
        made, state = over_replicas(replica, mesh, enter, leave)(seed, inputs, params, model_state)
        state = state.replace(params=made)
        step.optimizer.check(state.params)
        layout = shardings(step.optimizer.layouts(state.params), mesh)
        divided = jax.tree.map(lambda x: step.placement.layout(x.shape), state.params)
        placed = shardings(divided, mesh)
        # The optimizer's state is mapped by itself: where it is sharded, it leaves with another
        # spec, which needs the shapes of the parameters.
        shapes = jax.eval_shape(lambda x: x, state.params)
        if params is None and step.placement.division is not None:
            own = functools.partial(own_parts, step.placement.division, platform(mesh) == "cpu")
            state = state.replace(params=over_replicas(own, mesh, (jax.P(),), placed)(state.params))
        state = step.average.init(state)
        start = functools.partial(step.optimizer.init, shapes=shapes)
        optimizer = over_replicas(start, mesh, (placed,), layout)
        return state.replace(opt_state=optimizer(state.params))

    # Where it keeps many threads busy, XLA:CPU begins all parameters before it divides the first,
    # and needs four times the memory of all.
    one_by_one = unless_set({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})
    is_known = platform(mesh) == "cpu" and jax.__version_info__ >= (0, 9, 2)
    return step.replicas.jit(init, one_by_one if is_known else None)


def own_parts(division: Division, is_on_cpu: bool, params: Params) -> Params:
    """A replica's parts of parameters that a model has made.

    They are whole for a moment, one after another, and divided on each device: nothing is sent.
    """

    def own(x: jax.Array) -> jax.Array:
        if not is_on_cpu:
            return division.own(x)
        # XLA:CPU would fuse the slice with the operations that make the values, and round values in
        # another way than where they stay whole. It cannot know that this branch is always taken.
        is_replica = jax.lax.axis_index(AXIS_HERE.get()) >= 0
        return jax.lax.cond(is_replica, division.own, lambda x: jnp.zeros_like(division.own(x)), x)

    return jax.tree.map(own, params)


def given_layouts(step: Step, params: Params) -> PyTree:
    """Layouts of given parameters; parameters that are not trained are whole."""
    if params is None:
        return None
    layouts = jax.tree.map(lambda x: step.placement.layout(np.shape(x)), params)
    trained, rest = freeze(layouts, {}, step.model.frozen)
    return thaw(trained, jax.tree.map(lambda _: Replicated(), rest))[0]


def put_given(
    step: Step, mesh: jax.sharding.Mesh, values: tuple[Params, ModelState | None]
) -> tuple[Params, ModelState | None]:
    """Puts given values on the mesh, array by array: no device holds a divided array as a whole."""
    params, model_state = values
    layouts = given_layouts(step, params)

    def place(x: HostOrDevice, layout: Layout) -> jax.Array:
        return put(x, sharding_of(layout, mesh))

    return jax.tree.map(place, params, layouts), replicate(model_state, mesh)
