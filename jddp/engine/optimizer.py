"""The optimizer's update on one replica.

    PlacedOptimizer    all parameters, or the replica's parts of them where they are divided
    Zero1              a shard of each array: ZeRO, stage 1

With `Zero1` each replica has its shard of every gradient, keeps the optimizer's state only for its
shard of every parameter, updates that, and gathers the other shards. That gives the numbers of the
whole update if no element of the update depends on another element: Adam can be split, a method
that uses norms or whole matrices cannot. The equations of the optimizer decide, not its name: for
shards of each array they must give the shards of the whole result, and be the same equations, since
a mask may depend on shapes. Any other optimizer, such as Muon, which needs whole matrices, updates
whole arrays on each replica, which are gathered for the update alone: at rest its state is divided
too, and so it is where parameters are divided.

An optimizer moves a parameter also when its gradient is zero, by weight decay or momentum. With
`unused_parameters="skip"` parameters that no gradient reaches, and their state, stay as they are.
The state holds trees of the same form as the parameters; so an array that belongs to a parameter is
known by its path, which ends in the parameter's path.

References:
  Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020.
  https://arxiv.org/abs/2004.13336. Rajbhandari et al., "ZeRO", 2020, stage 1.
  https://arxiv.org/abs/1910.02054.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from jddp.engine.micro_batches import View, own_shards
from jddp.engine.state import Replicated, Sharded, TrainState, name_of, shapes_of
from jddp.engine.step import Placement
from jddp.ground.errors import ConfigError, check_choice
from jddp.ground.jaxprs import aval_shape, called, jaxprs_in_params
from jddp.ground.typing import Grads, OptState, Params, Path, PyTree, Settings, Tree
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer
from jddp.reduce.shards import Division, Flat, Shape

OPTIMIZER = "optimizer_update"  # the scope of the equations of an optimizer
GATHERED = "optimizer_whole"  # the scope of the gathers for an optimizer of whole arrays


@dataclass(frozen=True)
class PlacedOptimizer:
    """Each replica updates its part of each parameter, which may be all of it.

    Attributes:
      tx: Any optax optimizer.
      unused: Treatment of parameters that no gradient reaches: "zero", "skip" or "error".
      placement: Placement of the parameters.
    """

    tx: optax.GradientTransformation
    unused: str
    placement: Placement

    @property
    def division(self) -> Division | None:
        """Division of the optimizer's state; None where it is whole on each replica."""
        return self.placement.division

    def init(self, params: Params, shapes: Params) -> OptState:
        """Returns the state for the replica's parameters, or its parts of them."""
        if not (division := self._gathered_by(shapes)):
            return own_copy(self.tx.init(params))
        # XLA gathers nothing for a state that depends on shapes alone.
        return own_copy(own(division, self.tx.init(gathered(division, params, shapes))))

    def layouts(self, params: Params) -> PyTree:
        """Returns the layouts of parameters of the same shapes."""
        opt_state = jax.eval_shape(self.tx.init, params)
        return jax.tree.map(lambda x: self.placement.layout(x.shape), opt_state)

    def check(self, params: Params) -> None:
        """Refuses an optimizer that asks for more than a step has.

        Raises:
          ConfigError: If it is one.
        """
        # Makes the state for the parameters themselves: an optimizer may depend on their names.
        opt_state = jax.eval_shape(self.tx.init, params)
        try:
            jax.tree.map(lambda *_: None, opt_state, trace_whole(self.tx, params)[1][1])
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                "optimizer cannot be used in a step, which has gradients, a state of one "
                f"structure, parameters and value=, the loss: {str(error).splitlines()[0]} Choose "
                "one without line search, functions of the loss or gradients of rows; or write the "
                "loop, and average gradients with jddp.average_gradients."
            ) from error

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Updates the replica's parameters, or its parts of them."""
        before = state.params, state.opt_state
        shapes = jax.eval_shape(lambda x: view.whole(x, lambda x: x), state.params)
        if division := self._gathered_by(shapes):
            params, grads = (gathered(division, x, shapes) for x in (state.params, grads))
            opt_state = gathered(division, state.opt_state, jax.eval_shape(self.tx.init, shapes))
            after = own(division, updated(self.tx, grads, opt_state, params, value))
        else:
            after = updated(self.tx, grads, state.opt_state, state.params, value)
        # Unused parameters are put back after the update, since weight decay and momentum move a
        # parameter also with a gradient of 0.
        return self._kept(after, before, after[0], plan)

    def check_used(self, plan: BucketPlan) -> None:
        """Refuses a plan with unused parameters, where they are not allowed.

        Raises:
          ConfigError: If there are any, with their names.
        """
        if plan.unused and self.unused == "error":
            raise ConfigError(
                f"No gradient reaches {', '.join(plan.unused)}. Use them in the loss, or "
                "choose unused_parameters='zero' or 'skip'."
            )

    def _kept(self, new: Tree, old: Tree, params: Params, plan: BucketPlan) -> Tree:
        """The parameters and optimizer state to keep of an update."""
        is_taken_back = plan.unused and self.unused == "skip"
        return take_back(new, old, params, plan.unused) if is_taken_back else new

    def _gathered_by(self, shapes: Params) -> Division | None:
        """The division of arrays that are gathered for the update; None where none are."""
        division = self.division
        return division if division and mixes_elements(self.tx, shapes, division) else None


@final
@dataclass(frozen=True)
class Zero1(PlacedOptimizer):
    """Each replica updates its shard of each parameter, and all of them are whole everywhere.

    Attributes:
      reducer: Reducer of the gradients, by whose buckets shards of parameters are gathered.
      shards: Division of the optimizer's state.
    """

    reducer: Reducer
    shards: Flat

    @property
    def division(self) -> Division:
        """Division of the optimizer's state into shards."""
        return self.shards

    def init(self, params: Params, shapes: Params) -> OptState:
        """Returns the state for the replica's shards of all parameters."""
        if division := self._gathered_by(shapes):
            return own_copy(own(division, self.tx.init(params)))
        return own_copy(self.tx.init(own_shards(params, self.reducer.axis)))

    def layouts(self, params: Params) -> PyTree:
        """Returns sharded layouts."""
        shapes = params if self._gathered_by(params) else at_least_1d(params)
        # Scalars, such as a count of steps, are the same for every shard.
        return jax.tree.map(
            lambda x: Sharded(x.shape) if x.shape else Replicated(),
            jax.eval_shape(self.tx.init, shapes),
        )

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Updates a shard of each parameter, and gathers the shards of all replicas."""
        before = state.params, state.opt_state
        gather = functools.partial(self.reducer.gather, like=state.params, plan=plan)
        if division := self._gathered_by(state.params):
            shapes = jax.eval_shape(self.tx.init, state.params)
            opt_state = gathered(division, state.opt_state, shapes)
            with jax.named_scope(GATHERED):
                grads = view.whole(grads, gather)
            params, opt_state = updated(self.tx, grads, opt_state, state.params, value)
            return self._kept((params, own(division, opt_state)), before, params, plan)
        shards = own_shards(state.params, view.axis)
        shards, opt_state = updated(self.tx, view.shards(grads), state.opt_state, shards, value)
        # Gathers at the end of the step, not before the next: `state.params` is always complete, to
        # be evaluated, saved and compared.
        params = gather(shards)
        return self._kept((params, opt_state), before, params, plan)


def own(division: Division, tree: Tree) -> Tree:
    """Returns the replica's parts of whole arrays; numbers are the same on all."""
    return jax.tree.map(lambda x: division.own(x) if jnp.ndim(x) else x, tree)


def gathered(division: Division, parts: Tree, shapes: PyTree) -> Tree:
    """Returns whole arrays, from the parts of all replicas."""
    with jax.named_scope(GATHERED):
        return jax.tree.map(
            lambda x, of: division.whole(x, of.shape) if of.shape else x, parts, shapes
        )


def updated(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    value: Array,
) -> tuple[Params, OptState]:
    """Returns parameters and optimizer state after an update."""
    with jax.named_scope(OPTIMIZER):
        updates, opt_state = update(tx, grads, opt_state, params, value)
        return optax.apply_updates(params, updates), opt_state


def trace_whole(
    tx: optax.GradientTransformation, params: Params
) -> tuple[ClosedJaxpr, tuple[Params, OptState]]:
    """Traces the update of whole parameters of these shapes; returns its results' shapes too."""
    params = shapes_of(params)
    opt_state = jax.eval_shape(tx.init, params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    traced = _rule(tx).trace(params, opt_state, params, loss)
    return traced.jaxpr, traced.out_info


@functools.lru_cache(maxsize=8)
def _rule(tx: optax.GradientTransformation) -> jax.stages.Wrapped:
    """The update, as a function of which JAX keeps the traces."""
    return jax.jit(functools.partial(updated, tx))


def own_copy(opt_state: OptState) -> OptState:
    """Copies a first state: it may keep the parameters, and each leaf needs its own buffer."""
    return jax.tree.map(jnp.copy, opt_state)


def choose_optimizer(
    tx: optax.GradientTransformation,
    unused_parameters: str,
    placement: Placement,
    num_replicas: int,
    sharded_by: Reducer | None = None,
) -> PlacedOptimizer:
    """Returns the update of an optax optimizer.

    Args:
      tx: The optimizer.
      unused_parameters: "zero", "skip" or "error".
      placement: Placement of the parameters.
      num_replicas: Number of replicas.
      sharded_by: Reducer of the gradients, where each replica updates its shard; else None.

    Raises:
      ConfigError: If it is no optax optimizer.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigError(
            f"optimizer is of type {type(tx).__name__}. Give an optax optimizer: "
            "optax.adam(1e-3), not optax.adam; of an nnx.Optimizer its .tx."
        )
    # A tuple of functions is hashable, so it can be a cache key.
    tx = optax.with_extra_args_support(tx)
    check_choice("unused_parameters", unused_parameters, ("zero", "skip", "error"))
    if sharded_by is None:
        return PlacedOptimizer(tx, unused_parameters, placement)
    shards = Flat(sharded_by.axis, num_replicas)
    return Zero1(tx, unused_parameters, placement, sharded_by, shards)


def take_back(new: Tree, old: Tree, params: Params, unused: Collection[str]) -> Tree:
    """Returns `new`, but with the arrays of `old` that belong to unused parameters.

    Args:
      new: Trees with all or part of the form of the parameters, such as an optimizer's state.
      old: The same trees before the optimizer's update.
      params: The parameters, for their paths.
      unused: Names of parameters, as in `BucketPlan.unused`.
    """
    names = {
        _entries(path): name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }

    def choose(path: Path, after: jax.Array, before: jax.Array) -> jax.Array:
        return before if _owner(_entries(path), names) in unused else after

    return jax.tree_util.tree_map_with_path(choose, new, old)


def _entries(path: Path) -> tuple[str, ...]:
    # A parameter named "count" is in a dict; the count of an optimizer is a field: ".count".
    return tuple(
        ("." if isinstance(entry, jax.tree_util.GetAttrKey) else "")
        + jax.tree_util.keystr((entry,), simple=True)
        for entry in path
    )


def _owner(path: tuple[str, ...], names: Mapping[tuple[str, ...], str]) -> str | None:
    """The name of the longest parameter path that `path` ends in, numbers behind it aside.

    Behind it are numbers where an optimizer keeps a list of arrays for each parameter.
    """
    # Tries the longest path first: in nested dicts the path of one parameter may end in the path of
    # another.
    for start in range(len(path)):
        for end in range(len(path), start, -1):
            if path[start:end] in names:
                return names[path[start:end]]
            if not path[end - 1].isdigit():
                break
    return None


_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne
    neg nextafter not optimization_barrier or pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
# A list of allowed operations, so that an operation that is new to JAX is refused.
ELEMENTWISE = frozenset(_NAMES.split())


def update(
    tx: optax.GradientTransformation, grads: Grads, opt_state: OptState, params: Params, loss: Array
) -> tuple[Grads, OptState]:
    """Returns updates and state of an optimizer, to which the loss is given if it takes it.

    Some, such as `reduce_on_plateau`, ask for the loss. It is global, so that all replicas decide
    the same.
    """
    try:
        return optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
    except TypeError as error:
        # The type does not show it: SAM has the type of optimizers with more arguments, and takes
        # none.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        return tx.update(grads, opt_state, params)


def mixes_elements(tx: optax.GradientTransformation, params: Params, division: Division) -> bool:
    """Whether an optimizer cannot update the parts of parameters by themselves.

    Args:
      tx: The optimizer.
      params: Shapes of the whole parameters.
      division: Division of the parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    return not _is_separable(tx, treedef, tuple((x.shape, x.dtype) for x in leaves), division)


# A step is traced several times, and an optimizer of many parameters takes a while.
@functools.lru_cache(maxsize=16)
def _is_separable(
    tx: optax.GradientTransformation,
    treedef: jax.tree_util.PyTreeDef,
    forms: tuple[tuple[Shape, np.dtype], ...],
    division: Division,
) -> bool:
    params = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*form) for form in forms])
    rule = functools.partial(update, tx)
    parts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(division.part_shape(x.shape), x.dtype), params
    )
    whole = _arguments(tx, at_least_1d(params))
    # State of any other shape, such as Adafactor's rows and columns, has no shard that belongs to a
    # shard of a parameter.
    known = {(), *(x.shape for x in jax.tree.leaves(whole[0]))}
    if any(x.shape not in known for x in jax.tree.leaves(whole[1])):
        return False
    if not (is_elementwise(tx.init, whole[0]) and is_elementwise(rule, *whole)):
        return False
    # A mask by shape or size may treat a shard and the whole array differently, so the program for
    # shards has to have the same equations.
    try:
        part = _arguments(tx, parts)
        return is_same(tx.init, whole[:1], part[:1]) and is_same(rule, whole, part)
    except (TypeError, ValueError):  # The optimizer has shapes written down.
        return False


def _arguments(tx: optax.GradientTransformation, params: Params) -> tuple[PyTree, ...]:
    """Shapes of the arguments of an update: gradients, state, parameters and loss."""
    return params, jax.eval_shape(tx.init, params), params, jax.ShapeDtypeStruct((), jnp.float32)


def at_least_1d(params: Params) -> Params:
    """Shapes of the parameters, with one dim at least, as their parts have."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape or (1,), x.dtype), params)


def is_elementwise(function: Callable[..., PyTree], *shapes: PyTree) -> bool:
    """Whether elements of the results depend on the elements in their place and on numbers alone.

    Args:
      function: Function of trees of arrays that returns a tree of arrays.
      *shapes: Shapes of its arguments. Scalars are the same on all replicas, arrays are split.
    """
    return _keeps_places(_trace(function, shapes).jaxpr)


def _keeps_places(jaxpr: Jaxpr) -> bool:
    # A constant array has the shape of the whole, and would have to be cut.
    return not any(map(aval_shape, jaxpr.constvars)) and all(map(_keeps_place, jaxpr.eqns))


def _keeps_place(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    shapes = {shape for v in (*eqn.invars, *eqn.outvars) if (shape := aval_shape(v))}
    if shapes and (name == "cond" or called(eqn)):
        return all(map(_keeps_places, jaxprs_in_params(eqn.params)))
    repeats_number = name == "broadcast_in_dim" and not aval_shape(eqn.invars[0])
    return not shapes or repeats_number or (name in ELEMENTWISE and len(shapes) == 1)


def is_same(
    function: Callable[..., PyTree], some: Sequence[PyTree], others: Sequence[PyTree]
) -> bool:
    """Whether `function` has the same equations for arguments of other shapes, shapes aside."""
    return _form(_trace(function, some).jaxpr) == _form(_trace(function, others).jaxpr)


def _trace(function: Callable[..., PyTree], shapes: Sequence[PyTree]) -> ClosedJaxpr:
    with jax.disable_jit():  # Inlines calls of jitted functions.
        return jax.make_jaxpr(function)(*shapes)


def _form(jaxpr: Jaxpr) -> list[object]:
    """The equations and the flow of values between them, without shapes."""
    places: dict[Var, int] = {}

    def place(v: Var | Literal) -> object:
        if isinstance(v, Literal):
            return str(v)
        return places.setdefault(v, len(places)), getattr(v.aval, "dtype", None)

    def settings(params: Settings) -> Iterator[object]:
        for name, x in params.items():
            # Shapes differ between an array and its shard by definition; all else must be equal.
            if not name.endswith(("shape", "dimensions", "sizes")):
                inner = [*map(_form, jaxprs_in_params({name: x}))]
                yield name, inner or str(getattr(x, "__name__", x))

    form = [*map(place, jaxpr.invars)]
    for eqn in jaxpr.eqns:
        form += [eqn.primitive, *settings(eqn.params), *map(place, (*eqn.invars, *eqn.outvars))]
    return [*form, *map(place, jaxpr.outvars)]
