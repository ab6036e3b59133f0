"""Whether an optimizer updates each element by itself, read from its traced program.

A replica that has a shard of each array can compute its shard of the update if no element of the
update depends on another element: Adam can be split, a method that uses norms or whole matrices
cannot. The equations of the optimizer decide, not its name: for shards of each array they must give
the shards of the whole result, and be the same equations, since a mask may depend on shapes.

This room knows optimizers and equations, and nothing of meshes or steps.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jaxtyping import Array

from jddp.ground.jaxprs import Followed, aval_shape, called, follow
from jddp.ground.typing import Grads, OptState, Params, PyTree, Settings
from jddp.reduce.shards import Division, Shape

# One number for all elements; an element for each; a value in which elements are mixed.
UNIFORM, SPLIT, MIXED = range(3)
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
RESHAPING = frozenset(("broadcast_in_dim", "reshape", "squeeze"))


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
        # Its type does not show it: SAM is of those that take more arguments, and takes none.
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
    except (TypeError, ValueError):  # of an optimizer that has shapes written down
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
    traced = _trace(function, shapes)
    given = [SPLIT if x.shape else UNIFORM for x in jax.tree.leaves(shapes)]
    labels, _ = follow(traced.jaxpr, given, _label)
    return MIXED not in labels and not _has_constant_array(traced.jaxpr)


def _label(eqn: JaxprEqn, given: list[int]) -> Followed | None:
    """A rule of `follow`: None for branches and calls, whose equations are asked."""
    name, label = eqn.primitive.name, max(given, default=UNIFORM)
    shapes = {shape for v in (*eqn.invars, *eqn.outvars) if (shape := aval_shape(v))}
    if any(map(_has_constant_array, jaxprs_in_params(eqn.params))):
        label = MIXED
    elif shapes and (name == "cond" or called(eqn)):
        return None
    elif label == UNIFORM and shapes:  # such as an array of ones
        label = UNIFORM if name in ELEMENTWISE | RESHAPING else MIXED
    elif label == SPLIT:
        label = SPLIT if name in ELEMENTWISE and len(shapes) == 1 else MIXED
    return [label] * len(eqn.outvars), False


def _has_constant_array(jaxpr: Jaxpr) -> bool:
    """Whether a program has an array of the shape of the whole, which would have to be cut."""
    return any(map(aval_shape, jaxpr.constvars))


def is_same(function: Callable[..., PyTree], some: PyTree, others: PyTree) -> bool:
    """Whether `function` has the same equations for arguments of other shapes, shapes aside."""
    return _form(_trace(function, some).jaxpr) == _form(_trace(function, others).jaxpr)


def _trace(function: Callable[..., PyTree], shapes: Sequence[PyTree]) -> ClosedJaxpr:
    with jax.disable_jit():  # so that calls of jitted functions are inlined
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
