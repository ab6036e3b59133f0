"""How an optimizer can be divided over replicas, read from its traced program.

A replica that has a shard of each array can compute its shard of the update if no element of the
update depends on another element: Adam can be split, a method that uses norms or whole matrices
cannot. The equations of the optimizer decide, not its name: for shards of each array they must give
the shards of the whole result, and be the same equations, since a mask may depend on shapes.

Of an optimizer that is not separable, such as Muon, each parameter is judged by its own equations:

    separable            updated in parts, as above
    slice by slice       the slices along its first dim do not depend on each other: a stack of
                         matrices, such as the parameters of scanned layers
    whole                all of it is needed

Slices and whole arrays have owners: replicas that get them for the update, and send back the parts
of the results. Equal equations of arrays of one shape are evaluated once, for a stack of arrays.

This room knows optimizers and equations, and nothing of meshes or steps.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jaxtyping import Array

from jddp.jaxprs import Excerpt, aval_shape, called, excerpts
from jddp.reduce.shards import Division, Shape
from jddp.typing import Grads, Leaf, OptState, Params, PyTree, Settings

UNIFORM, SPLIT = "one number for all elements", "an element for each"
SHARED = "an array of all parameters"
PARTS, SLICES, WHOLE = "parts", "slices", "whole"
_NAMES = """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne
    neg nextafter not optimization_barrier or pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
# Those that do not mix the slices of an array along its first dim, by their parameters.
KEEPS_SLICES: dict[str, Callable[[Settings], bool]] = {
    "broadcast_in_dim": lambda params: params["broadcast_dimensions"][0] == 0,
    "reduce_max": lambda params: 0 not in params["axes"],
    "reduce_min": lambda params: 0 not in params["axes"],
    "reduce_sum": lambda params: 0 not in params["axes"],
    "reshape": lambda params: True,
    "squeeze": lambda params: True,
    "transpose": lambda params: params["permutation"][0] == 0,
}
# A list of what is allowed, so that an operation that is new to JAX is refused, and not trusted.
ELEMENTWISE = frozenset(_NAMES.split())
Keeps = Callable[[JaxprEqn, list[str]], bool]
RESHAPING = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
MATRICES = frozenset(
    ("cholesky", "eigh", "geqrf", "householder_product", "lu", "qr", "svd", "triangular_solve")
)


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


def is_separable(
    tx: optax.GradientTransformation, params: Params, part_shape: Callable[[Shape], Shape]
) -> bool:
    """Whether an optimizer can update a part of each parameter by itself.

    Args:
      tx: The optimizer.
      params: Shapes of the parameters.
      part_shape: Function of a parameter's shape that returns the shape of a part.
    """
    loss, rule = jax.ShapeDtypeStruct((), jnp.float32), functools.partial(update, tx)
    parts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(part_shape(x.shape), x.dtype), params)
    whole, part = ((x, jax.eval_shape(tx.init, x), x, loss) for x in (at_least_1d(params), parts))
    # State of any other shape, such as Adafactor's rows and columns, has no shard that belongs to a
    # shard of a parameter.
    known = {(), *(x.shape for x in jax.tree.leaves(whole[0]))}
    if any(x.shape not in known for x in jax.tree.leaves(whole[1])):
        return False
    if find_mixing(tx.init, whole[0]) or find_mixing(rule, *whole):
        return False
    # A mask by shape or size may treat a shard otherwise than the whole array, so the program for
    # shards has to have the same equations.
    return is_same(tx.init, whole[:1], part[:1]) and is_same(rule, whole, part)


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
    label = _join(*_follow(_trace(function, shapes), given, _is_elementwise))
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
            if not name.endswith(("shape", "dimensions", "sizes")):
                inner = [*map(_form, jaxprs_in_params({name: x}))]
                yield name, inner or str(getattr(x, "__name__", x))

    form = [*map(place, jaxpr.invars)]
    for eqn in jaxpr.eqns:
        form += [eqn.primitive, *settings(eqn.params), *map(place, (*eqn.invars, *eqn.outvars))]
    return [*form, *map(place, jaxpr.outvars)]


def _follow(jaxpr: Jaxpr, given: Sequence[str], keeps: Keeps) -> list[str]:
    """The label of each result: UNIFORM, SPLIT, or the operation that mixed elements.

    Args:
      jaxpr: The program.
      given: Labels of its inputs.
      keeps: Function of an equation and the labels of its inputs, some of which are SPLIT: whether
        its results are too.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))
    # A constant array has the shape of the whole: it would have to be cut as the parameters are.
    known |= {v: "constant" if aval_shape(v) else UNIFORM for v in jaxpr.constvars}

    def label(v: Var | Literal) -> str:
        return UNIFORM if isinstance(v, Literal) else known[v]

    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _results(eqn, [*map(label, eqn.invars)], keeps), strict=True)
    return [*map(label, jaxpr.outvars)]


def _results(eqn: JaxprEqn, given: list[str], keeps: Keeps) -> list[str]:
    name = eqn.primitive.name
    num = len(eqn.outvars)
    joined = _join(*given)
    if joined == SHARED and SPLIT not in given:
        return [SHARED if aval_shape(v) else UNIFORM for v in eqn.outvars]
    if joined not in (UNIFORM, SPLIT):
        return [joined] * num
    # A branch by a value that is the same for all elements, such as a count of steps, mixes
    # nothing; a branch by an element would.
    if name == "cond" and given[0] == UNIFORM:
        return [
            *map(
                _join,
                *(_follow(branch.jaxpr, given[1:], keeps) for branch in eqn.params["branches"]),
            )
        ]
    if inner := called(eqn):
        return _follow(inner, given, keeps)
    arrays = _shapes_in(eqn)
    if not arrays or (joined == UNIFORM and name in ELEMENTWISE | RESHAPING):
        return [UNIFORM] * num
    return [SPLIT if keeps(eqn, given) else name] * num


def _shapes_in(eqn: JaxprEqn) -> set[Shape]:
    return {shape for v in (*eqn.invars, *eqn.outvars) if (shape := aval_shape(v))}


def _is_elementwise(eqn: JaxprEqn, given: Sequence[str]) -> bool:
    return eqn.primitive.name in ELEMENTWISE and len(_shapes_in(eqn)) == 1


def _is_slice_by_slice(eqn: JaxprEqn, given: Sequence[str]) -> bool:
    """Whether slices of the results, along the first dim, are made of those of the inputs alone."""
    name = eqn.primitive.name
    inputs = [aval_shape(v) for v, label in zip(eqn.invars, given, strict=True) if label == SPLIT]
    if len({shape[:1] for shape in (*inputs, *map(aval_shape, eqn.outvars))}) > 1:
        return False
    if name == "dot_general":
        return len(inputs) == 2 and _batch_dims(eqn) == (0, 0)
    if name in MATRICES:
        return len(inputs) == len(eqn.invars) and min(map(len, inputs)) > 2
    return name in ELEMENTWISE or (name in KEEPS_SLICES and KEEPS_SLICES[name](eqn.params))


def _batch_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    _, (left, right) = eqn.params["dimension_numbers"]
    return (*left[:1], *right[:1])


def _join(*labels: str) -> str:
    """The label of a value that depends on values with these labels."""
    mixed = [label for label in labels if label not in (UNIFORM, SPLIT)]
    return mixed[0] if mixed else SPLIT if SPLIT in labels else UNIFORM


class Inseparable(Exception):
    """The reason why an optimizer can be divided in no way."""


@dataclass(frozen=True)
class OwnedUpdate:
    """The update of parameters as whole arrays by their owners, by the same equations.

    Attributes:
      one: Equations for one of them; positions are those of the first.
      inputs: Positions of each input, parameter by parameter; none of one that all share.
      results: Positions of each result, parameter by parameter.
      sliced: Whether it is one parameter, of which slices along its first dim are updated.
    """

    one: Excerpt
    inputs: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    sliced: bool

    def run(
        self, division: Division, given: Sequence[Array], shapes: Sequence[Shape]
    ) -> dict[int, Array]:
        """Returns the replica's parts of the results, by their positions."""

        def owned(position: int, places: tuple[int, ...]) -> Array:
            if not places:
                return given[position]
            shape = shapes[places[0]]
            parts = [given[i].reshape(division.part_shape(shape)) for i in places]
            return division.to_owners(parts, shape, sliced=self.sliced)

        stacks = [*map(owned, self.one.inputs, self.inputs)]
        axes = [0 if places else None for places in self.inputs]
        done = jax.vmap(functools.partial(_evaluate, self.one), in_axes=axes)(*stacks)
        parts: dict[int, Array] = {}
        for places, stack in zip(self.results, done, strict=True):
            shape, num = shapes[places[0]], len(places)
            own = division.from_owners(stack, num, shape, sliced=self.sliced)
            parts |= zip(places, own, strict=True)
        return parts


@dataclass(frozen=True)
class DividedUpdate:
    """The update of an optimizer that is not separable, from the replica's parts of all arrays.

    Positions are those of inputs, (gradients, state, parameters, loss), leaf by leaf, and those of
    results, (updates, state), which begin alike.

    Attributes:
      division: Division of the arrays.
      shapes: Shapes of the inputs as whole arrays.
      in_parts: Equations of separable parameters, for their parts, and of numbers.
      owned: Updates of all other parameters.
      is_shared: Leaf by leaf of the state, whether it is the same for all parameters.
    """

    division: Division
    shapes: tuple[Shape, ...]
    in_parts: tuple[Excerpt, ...]
    owned: tuple[OwnedUpdate, ...]
    is_shared: tuple[bool, ...]

    def init(self, tx: optax.GradientTransformation, params: Params) -> OptState:
        """Returns the replica's parts of the first state, from the whole parameters."""
        opt_state = tx.init(params)
        return jax.tree.map(self._own, opt_state, self.shared(opt_state))

    def whole(self, params: Params) -> Params:
        """Returns the whole parameters, from the replica's parts of them."""
        parts, treedef = jax.tree.flatten(params)
        return jax.tree.unflatten(treedef, map(self.division.whole, parts, self.shapes))

    def shared(self, opt_state: PyTree) -> PyTree:
        """Returns for each leaf of a tree like the state whether all parameters share it."""
        return jax.tree.unflatten(jax.tree.structure(opt_state), self.is_shared)

    def _own(self, x: Array, is_shared: bool) -> Array:
        return x if is_shared else self.division.own(x)

    def __call__(
        self, grads: Grads, opt_state: OptState, params: Params, loss: Array
    ) -> tuple[Grads, OptState]:
        """Returns the replica's parts of the updates and of the state."""
        given = jax.tree.leaves((grads, opt_state, params, loss.astype(jnp.float32)))
        done: dict[int, Array] = {}
        for part in self.in_parts:
            inputs = map(_reshaped, [given[i] for i in part.inputs], part.program.in_avals)
            done |= zip(part.results, _evaluate(part, *inputs), strict=True)
        for owned in self.owned:
            done |= owned.run(self.division, given, self.shapes)
        like, treedef = jax.tree.flatten((grads, opt_state))
        results = [_reshaped(done[i], x) for i, x in enumerate(like)]
        updates, opt_state = jax.tree.unflatten(treedef, results)
        return updates, opt_state


def _reshaped(x: Array, like: Leaf) -> Array:
    # A parameter without dims has a part with one.
    return jnp.reshape(x, like.shape)


def _evaluate(part: Excerpt, *inputs: Array) -> list[Array]:
    return eval_jaxpr(part.program.jaxpr, part.program.consts, *inputs)


def divided_update(
    tx: optax.GradientTransformation, params: Params, division: Division | None
) -> DividedUpdate | None:
    """Returns the update from parts of an optimizer that is not separable; None if it is.

    Args:
      tx: The optimizer.
      params: Shapes of the parameters.
      division: Division of the arrays; None where they are whole, and so is the update.

    Raises:
      Inseparable: If parameters depend on each other, with the operation.
    """
    if division is None:
        return None
    leaves, treedef = jax.tree.flatten(params)
    return _divided_update(tx, treedef, tuple((x.shape, x.dtype) for x in leaves), division)


# A step is traced several times, and an optimizer of many parameters takes a while.
@functools.lru_cache(maxsize=16)
def _divided_update(
    tx: optax.GradientTransformation,
    treedef: jax.tree_util.PyTreeDef,
    forms: tuple[tuple[Shape, np.dtype], ...],
    division: Division,
) -> DividedUpdate | None:
    params = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*form) for form in forms])
    if is_separable(tx, params, division.part_shape):
        return None
    return _Reading(tx, at_least_1d(params), division).update()


class _Reading:
    """The equations of an optimizer, parameter by parameter.

    Args:
      tx: The optimizer.
      params: Shapes of the parameters.
      division: Division of the arrays.
    """

    def __init__(
        self, tx: optax.GradientTransformation, params: Params, division: Division
    ) -> None:
        self._tx = tx
        self._params, self._division = params, division
        num = len(jax.tree.leaves(params))
        self._traced = self._trace([WHOLE] * num)
        self._shapes = tuple(x.shape for x in self._traced.in_avals)
        self._num_results = len(self._traced.jaxpr.outvars)
        self._owners = _find_owners(self._traced, num)
        self._places = [self._places_of(i) for i in range(num)]
        self._whole = excerpts(self._traced, self._places)

    def update(self) -> DividedUpdate:
        """Returns the update from parts."""
        kinds, pieces = self._cut()
        in_parts = [i for i, kind in enumerate(kinds) if kind == PARTS]
        separable = sorted(place for i in in_parts for place in self._places[i])
        groups: dict[object, list[Excerpt]] = {}
        for i, (kind, cut) in enumerate(zip(kinds, excerpts(pieces, self._places), strict=True)):
            if kind == SLICES:
                groups[i] = [cut]
            elif kind == WHOLE:
                groups.setdefault(self._key(self._whole[i]), []).append(self._whole[i])
        (numbers,), (parts,) = (
            excerpts(self._traced, [self._places_of(None)]),
            excerpts(pieces, [separable]),
        )
        return DividedUpdate(
            division=self._division,
            shapes=self._shapes,
            in_parts=(numbers, parts),
            owned=tuple(self._owned(own, sliced=isinstance(k, int)) for k, own in groups.items()),
            is_shared=tuple(x is None for x in self._owners[len(kinds) : self._num_results]),
        )

    def _cut(self) -> tuple[list[str], ClosedJaxpr]:
        """What of each parameter is updated at once, and the equations for it."""
        kinds = [*map(self._kind, self._whole)]
        while True:
            try:
                pieces = self._trace(kinds)
            except (TypeError, ValueError):  # of an optimizer that has shapes written down
                return [WHOLE] * len(kinds), self._traced
            own = excerpts(pieces, self._places)
            # Equations that depend on shapes, such as a mask by size, are those of whole arrays.
            wrong = [i for i, kind in enumerate(kinds) if not self._is_cut(i, kind, own[i], pieces)]
            if not wrong:
                return kinds, pieces
            for i in wrong:
                kinds[i] = WHOLE

    def _kind(self, whole: Excerpt) -> str:
        """Whether a parameter can be updated in parts or slices, by its equations."""
        (owner,) = {self._owners[i] for i in whole.results}
        shapes = [self._shapes[i] for i in whole.inputs if self._owners[i] == owner]
        jaxpr = whole.program.jaxpr
        labels = [self._label(i) for i in whole.inputs]
        if len({*shapes}) <= 1 and {*_follow(jaxpr, labels, _is_elementwise)} <= {UNIFORM, SPLIT}:
            return PARTS
        if not shapes:
            raise Inseparable("updates a parameter by no array of its own")
        if len({x[0] for x in shapes}) > 1 or min(map(len, shapes)) < 2 or shapes[0][0] < 2:
            return WHOLE
        return SLICES if {*_follow(jaxpr, labels, _is_slice_by_slice)} == {SPLIT} else WHOLE

    def _label(self, place: int) -> str:
        if self._owners[place] is not None:
            return SPLIT
        return SHARED if self._shapes[place] else UNIFORM

    def _is_cut(self, i: int, kind: str, own: Excerpt, pieces: ClosedJaxpr) -> bool:
        """Whether the equations of a piece are those of the whole parameter, for all its arrays."""
        mine = [j for j in own.inputs if self._owners[j] == i]
        shapes = [self._piece(self._shapes[j], kind) for j in mine]
        fits = shapes == [pieces.in_avals[j].shape for j in mine]
        a, b = ((x.inputs, _form(x.program.jaxpr)) for x in (own, self._whole[i]))
        return kind == WHOLE or (fits and a == b)

    def _piece(self, shape: Shape, kind: str) -> Shape:
        if kind == PARTS:
            return self._division.part_shape(shape)
        return (1, *shape[1:]) if kind == SLICES else shape

    def _trace(self, kinds: Sequence[str]) -> ClosedJaxpr:
        """The equations for pieces of the parameters."""
        leaves, treedef = jax.tree.flatten(self._params)
        shapes = [self._piece(x.shape, kind) for x, kind in zip(leaves, kinds, strict=True)]
        dtypes = [x.dtype for x in leaves]
        pieces = jax.tree.unflatten(treedef, map(jax.ShapeDtypeStruct, shapes, dtypes))
        opt_state = jax.eval_shape(self._tx.init, pieces)
        loss, rule = jax.ShapeDtypeStruct((), jnp.float32), functools.partial(update, self._tx)
        with jax.disable_jit():
            return jax.make_jaxpr(rule)(pieces, opt_state, pieces, loss)

    def _places_of(self, owner: int | None) -> list[int]:
        """Positions of the results of a parameter, or of those of none."""
        return [i for i, x in enumerate(self._owners[: self._num_results]) if x == owner]

    def _key(self, own: Excerpt) -> object:
        """A value that is equal for parameters with the same equations and shapes."""
        shared = tuple(i for i in own.inputs if self._owners[i] is None)
        return str(own.program.jaxpr), tuple(map(id, own.program.consts)), shared

    def _owned(self, members: Sequence[Excerpt], *, sliced: bool) -> OwnedUpdate:
        own = zip(*(x.inputs for x in members), strict=True)
        inputs = tuple(() if self._owners[places[0]] is None else places for places in own)
        results = tuple(zip(*(x.results for x in members), strict=True))
        return OwnedUpdate(members[0], inputs, results, sliced)


def _find_owners(traced: ClosedJaxpr, num: int) -> list[int | None]:
    """The parameter that each input belongs to; None for those that all parameters share.

    Raises:
      Inseparable: If parameters depend on each other, or a number on an array.
    """
    num_results = len(traced.jaxpr.outvars)
    owners = [*range(num), *[None] * (num_results - num), *range(num), None]
    needs = [{*part.inputs} for part in excerpts(traced, [[i] for i in range(num_results)])]
    # State that is made of such state alone, and of no gradient or parameter: a count of steps.
    steady = {*range(num, num_results)}
    while moved := {i for i in steady if needs[i] - steady - {len(owners) - 1}}:
        steady -= moved
    moving = [i for i in range(num_results) if i not in steady]
    before: list[int | None] = []
    while owners != before:
        before = [*owners]
        for i in moving:
            _join_owners(traced, owners, i, needs[i] - steady - {len(owners) - 1})
    for i in steady:
        users = {owners[j] for j in moving if i in needs[j]}
        if len(users) == 1 and _shape_of(traced, i) == _shape_of(traced, *users):
            (owners[i],) = users
    return owners


def _join_owners(traced: ClosedJaxpr, owners: list[int | None], i: int, needed: set[int]) -> None:
    """Lets a result and the inputs that it needs belong to one parameter."""
    found = {owners[j] for j in (i, *needed)} - {None}
    if len(found) > 1:
        (part,) = excerpts(traced, [[i]])
        name = _find_joining(part, owners)
        raise Inseparable(f"applies {name!r} to several parameters at once")
    if not _shape_of(traced, i):
        raise Inseparable("keeps a number that depends on elements of arrays")
    for j in (i, *needed):
        (owners[j],) = found or {None}


def _shape_of(traced: ClosedJaxpr, place: int | None) -> Shape:
    return () if place is None else traced.in_avals[place].shape


def _find_joining(part: Excerpt, owners: Sequence[int | None]) -> str:
    """Names the first operation on values of several parameters."""
    jaxpr = part.program.jaxpr
    known = {v: {owners[i]} - {None} for v, i in zip(jaxpr.invars, part.inputs, strict=True)}
    for eqn in jaxpr.eqns:
        found = set[int | None]().union(
            *(known.get(v, ()) for v in eqn.invars if isinstance(v, Var))
        )
        if len(found) > 1:
            return eqn.primitive.name
        known |= dict.fromkeys(eqn.outvars, found)
    return "an operation"
