"""Whether an optimizer is separable (works element by element), read from its traced program.

A replica that has a shard of each array can compute its shard of the update if no element of the
update depends on another element: Adam can be split, a method that uses norms or whole matrices
cannot. The equations of the optimizer decide, not its name: for shards of each array they must give
the shards of the whole result, and be the same equations, since a mask may depend on shapes.

This room knows optimizers and equations, and nothing of meshes or steps.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jaxtyping import Array

from jddp.jaxprs import aval_shape, called
from jddp.reduce.shards import Shape
from jddp.typing import OptState, Params, PyTree, Settings

UNIFORM, SPLIT = "one number for all elements", "an element for each"
_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne
    neg nextafter not optimization_barrier or pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
# A list of what is allowed, so that an operation that is new to JAX is refused, and not trusted.
ELEMENTWISE = frozenset(_NAMES.split())
RESHAPING = frozenset(("broadcast_in_dim", "reshape", "squeeze"))


def why_not_split(
    tx: optax.GradientTransformation, params: Params, part_shape: Callable[[Shape], Shape]
) -> str:
    """The reason why an optimizer of such parameters cannot be split into parts; "" if it can.

    Args:
      tx: The optimizer.
      params: Shapes of the parameters.
      part_shape: Function of a parameter's shape that returns the shape of a part.
    """
    tx = optax.with_extra_args_support(tx)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    parts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(part_shape(x.shape), x.dtype), params)
    whole, part = ((x, loss, jax.eval_shape(tx.init, x)) for x in (at_least_1d(params), parts))

    def update(params: Params, loss: Array, opt_state: OptState) -> PyTree:
        return tx.update(params, opt_state, params, value=loss)

    # State of any other shape, such as Adafactor's rows and columns, has no shard that belongs to a
    # shard of a parameter.
    known = {(), *(x.shape for x in jax.tree.leaves(whole[0]))}
    if strange := [x.shape for x in jax.tree.leaves(whole[2]) if x.shape not in known]:
        return f"keeps an array of shape {strange[0]}, which no parameter has"
    if mixing := find_mixing(tx.init, whole[0]) or find_mixing(update, *whole):
        return f"applies {mixing!r} to arrays as a whole"
    # A mask by shape or size may treat a shard otherwise than the whole array, so the program for
    # shards has to have the same equations.
    if is_same(tx.init, whole[:1], part[:1]) and is_same(update, whole, part):
        return ""
    return "does something else with arrays of other shapes"


def at_least_1d(params: Params) -> Params:
    """Shapes of the parameters, with one dim at least, as their parts have."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape or (1,), x.dtype), params)


def find_mixing(function: Callable[..., PyTree], *shapes: PyTree) -> str:
    """Names an operation in `function` by which elements depend on others; "" if there is none.

    Args:
      function: Function of trees of arrays that returns a tree of arrays.
      *shapes: Shapes of its arguments. Scalars are the same on all replicas, arrays are split.
    """
    given = [SPLIT if x.shape else UNIFORM for x in jax.tree.leaves(shapes)]
    label = _join(*_follow(_trace(function, shapes), given))
    return "" if label in (UNIFORM, SPLIT) else label


def is_same(function: Callable[..., PyTree], some: PyTree, others: PyTree) -> bool:
    """Whether `function` has the same equations for arguments of other shapes, shapes aside."""
    return _form(_trace(function, some)) == _form(_trace(function, others))


def _trace(function: Callable[..., PyTree], shapes: Sequence[PyTree]) -> Jaxpr:
    with jax.disable_jit():  # so that calls of jitted functions are inlined
        return jax.make_jaxpr(function)(*shapes).jaxpr


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
            if not name.endswith(("shape", "dimensions")):
                inner = [*map(_form, jaxprs_in_params({name: x}))]
                yield name, inner or str(getattr(x, "__name__", x))

    form = [*map(place, jaxpr.invars)]
    for eqn in jaxpr.eqns:
        form += [eqn.primitive, *settings(eqn.params), *map(place, (*eqn.invars, *eqn.outvars))]
    return [*form, *map(place, jaxpr.outvars)]


def _follow(jaxpr: Jaxpr, given: Sequence[str]) -> list[str]:
    """The label of each result: UNIFORM, SPLIT, or the operation that mixed elements."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    # A constant array has the shape of the whole: it would have to be cut as the parameters are.
    known |= {v: "constant" if aval_shape(v) else UNIFORM for v in jaxpr.constvars}

    def label(v: Var | Literal) -> str:
        return UNIFORM if isinstance(v, Literal) else known[v]

    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _results(eqn, [*map(label, eqn.invars)]), strict=True)
    return [*map(label, jaxpr.outvars)]


def _results(eqn: JaxprEqn, given: list[str]) -> list[str]:
    name = eqn.primitive.name
    num = len(eqn.outvars)
    joined = _join(*given)
    if joined not in (UNIFORM, SPLIT):
        return [joined] * num
    # A branch by a value that is the same for all elements, such as a count of steps, mixes
    # nothing; a branch by an element would.
    if name == "cond" and given[0] == UNIFORM:
        return [
            *map(_join, *(_follow(branch.jaxpr, given[1:]) for branch in eqn.params["branches"]))
        ]
    if inner := called(eqn):
        return _follow(inner, given)
    arrays = {shape for v in (*eqn.invars, *eqn.outvars) if (shape := aval_shape(v))}
    if not arrays or (joined == UNIFORM and name in ELEMENTWISE | RESHAPING):
        return [UNIFORM] * num
    if name in ELEMENTWISE and len(arrays) == 1:
        return [SPLIT] * num
    return [name] * num


def _join(*labels: str) -> str:
    """The label of a value that depends on values with these labels."""
    mixed = [label for label in labels if label not in (UNIFORM, SPLIT)]
    return mixed[0] if mixed else SPLIT if SPLIT in labels else UNIFORM
