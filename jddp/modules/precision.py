"""Mixed precision: parameters and state in float32, the arithmetic of a model in a narrower dtype.

    casts = CASTS.get()                               # a method `with_casts` has them
    params = casts.narrow(params)                     # the loss begins here
    outputs = casts.call(model.__call__, *inputs)     # the loss calls the model

Each call of the model in a loss is traced in the scope "model", whether anything is cast or not.

Layers with products cast their inputs, and the model's outputs are cast back. So the loss is in
float32, like batch statistics and the gradients of parameters. Inputs stay as they are until a
layer casts them: arithmetic on coordinates or times would be wrong after the cast. A layer that
names another dtype is refused. The policy follows Micikevicius et al., "Mixed Precision Training",
ICLR 2018, https://arxiv.org/abs/1710.03740.

A product of the model's own takes the dtype of its factors. So an input that would make a product
wide, or an equation fail, is cast where the loss calls the model. `with_casts` finds such inputs by
tracing.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jddp.ground.errors import ConfigError
from jddp.ground.jaxprs import dtype_of, products
from jddp.ground.typing import PyTree, Tree

MODEL = "model"  # The scope of a model's equations, inside the scope of its loss.
ALL = range(sys.maxsize)  # The numbers of all inputs.
# Linen's layers with products; NNX layers are given the dtype.
_LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvLocal, nn.ConvTranspose, nn.Embed)


class Casts:
    """The casts of one run of a loss, and the scope of its calls of the model.

    Args:
      dtype: Dtype of the arithmetic; None casts nothing.
      kept: Numbers of inputs of the model that are not cast, in the order of its calls. If all are
        cast, layers of Linen take the dtype of their inputs.

    Attributes:
      numbers: Numbers of the inputs to come.
    """

    def __init__(self, dtype: np.dtype | None, kept: Container[int] = ALL) -> None:
        self._dtype = dtype
        self._kept = kept
        self._is_inside = False
        self.numbers = itertools.count()

    def narrow(self, tree: Tree) -> Tree:
        """The tree with floating arrays in the dtype of the arithmetic."""
        return tree if self._dtype is None else _cast(tree, self._dtype)

    def call(self, method: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls a method with arguments and results cast; calls inside it are left alone."""
        if self._is_inside:
            return method(*args, **kwargs)
        self._is_inside = True
        try:
            with jax.named_scope(MODEL):
                if self._dtype is None:
                    return method(*args, **kwargs)
                args, kwargs = jax.tree.map(self._input, (args, kwargs))
                return _cast(method(*args, **kwargs), "float32")
        finally:
            self._is_inside = False

    def _input(self, x: Tree) -> Tree:
        return x if next(self.numbers) in self._kept else self.narrow(x)

    def check(self, layer: object, name: str) -> None:
        """Refuses a layer that has a dtype of its own.

        Raises:
          ConfigError: If it has another dtype than the casts.
        """
        own = getattr(layer, "dtype", None)
        if self._dtype is None or own is None or jnp.dtype(own) == self._dtype:
            return
        raise ConfigError(
            f"compute_dtype={self._dtype.name!r}: the {type(layer).__name__} {name!r} computes in "
            f"{jnp.dtype(own).name}, its own dtype. Give it dtype=None, or leave out compute_dtype."
        )

    def of_linen(self) -> AbstractContextManager[None]:
        """Lets the outermost methods of a Linen module cast, while open."""

        def intercept(
            call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> PyTree:
            layer = context.module
            if layer.scope is not None:
                self.check(layer, "/".join(layer.path))
            if self._dtype and isinstance(layer, nn.Embed) and context.method_name == "__call__":
                call = partial(_cast_rows, layer, call, self._dtype)
            if self._kept and self._is_inside and isinstance(layer, _LAYERS):
                args, kwargs = self.narrow((args, kwargs))
            return self.call(call, *args, **kwargs)

        return nn.intercept_methods(intercept)

    def of_nnx(self, module: nnx.Module) -> None:
        """Lets the outermost methods of an NNX module cast; it is the step's own copy."""
        for path, layer in nnx.iter_modules(module) if self._dtype is not None else ():
            given = getattr(layer, "dtype", self._dtype)
            # Without a dtype, an Embed takes the dtype of its parameters, and a BatchNorm's output
            # would have the dtype of its statistics.
            if given is None or (isinstance(layer, nnx.Embed) and given == layer.param_dtype):
                object.__setattr__(layer, "dtype", self._dtype)
            self.check(layer, "/".join(map(str, path)))
            if isinstance(layer, nnx.Embed):
                layer.__class__ = _embedding_class(type(layer))
        module.__class__ = _casting_class(type(module))


CASTS: ContextVar[Casts] = ContextVar("casts")  # The casts of the loss that runs.


def with_casts(method: Any) -> Any:
    """Decorates a model's method that runs a loss, so that `CASTS` follow `compute_dtype`."""

    @functools.wraps(method)
    def run(model: Any, *given: PyTree) -> PyTree:
        def once(casts: Casts) -> PyTree:
            token = CASTS.set(casts)
            try:
                return method(model, *given)
            finally:
                CASTS.reset(token)

        dtype = model.compute_dtype
        return once(Casts(dtype) if dtype is None else Casts(dtype, _inputs_to_keep(once, dtype)))

    return run


def _inputs_to_keep(run: Callable[[Casts], PyTree], dtype: np.dtype) -> Container[int]:
    """Finds inputs of a model that need not be cast where the loss calls it.

    An input is cast if a product would be wider without the cast, or if the model could not be
    traced: some equations, such as `lax.conv_general_dilated`, need factors of one dtype.
    """

    def wide(casts: Casts) -> list[bool]:
        # The outputs are left out: they may be anything, and are checked later.
        traced = jax.make_jaxpr(lambda: (run(casts), ())[1])()
        return [{*map(dtype_of, x.invars[:2])} != {dtype} for x in products(traced.jaxpr)]

    all_cast = Casts(dtype, kept=())
    fewest = wide(all_cast)

    def fits(kept: Container[int]) -> bool:
        try:
            pairs = zip(wide(Casts(dtype, kept)), fewest, strict=True)
            return all(is_wide <= before for is_wide, before in pairs)
        except Exception:  # The first trace has raised any error of the model itself.
            return False

    if fits(ALL):
        return ALL
    each = {i for i in range(next(all_cast.numbers)) if fits({i})}
    return each if fits(each) else ()


def derived(cls: Any, **methods: Callable[..., PyTree]) -> Any:
    """Makes a subclass of the same name with other methods."""
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**named, **methods})


@functools.cache
def _casting_class(cls: Any) -> Any:
    """Makes a subclass whose methods are called through the casts of the loss that runs."""

    def casting(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def method(module: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            # The module is a tree of arrays too, and stays as it is.
            return CASTS.get().call(partial(function, module), *args, **kwargs)

        return functools.wraps(function)(method)

    found = {name: inspect.getattr_static(cls, name) for name in dir(cls) if _is_own(name)}
    methods = {name: casting(x) for name, x in found.items() if isinstance(x, FunctionType)}
    return derived(cls, **methods)


def _cast_rows(
    layer: Any, call: Callable[..., Any], dtype: np.dtype, *args: PyTree, **kwargs: PyTree
) -> jax.Array:
    """Looks up rows of an `Embed`, and casts the rows instead of their table.

    The gradient of a row is a sum over tokens, in the dtype of the look-up. If the table was cast
    already, its gradient is cast once more at the end, like other gradients.
    """
    own = layer.promote_dtype
    object.__setattr__(layer, "promote_dtype", _widen)
    try:
        return call(*args, **kwargs).astype(dtype)
    finally:
        object.__setattr__(layer, "promote_dtype", own)


def _widen(*tables: PyTree, **_: PyTree) -> list[jax.Array]:
    return [x.astype(jnp.promote_types(x.dtype, "float32")) for x in jax.tree.leaves(tables)]


@functools.cache
def _embedding_class(cls: Any) -> Any:
    """The class of `nnx.Embed` whose rows are cast."""

    def call(layer: Any, *args: PyTree, **kwargs: PyTree) -> jax.Array:
        return _cast_rows(layer, partial(cls.__call__, layer), layer.dtype, *args, **kwargs)

    return derived(cls, __call__=call)


def _is_own(name: str) -> bool:
    """Whether a method is the user's, so that a loss may call it."""
    return name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))


def _cast(tree: Tree, dtype: np.dtype | str) -> Tree:
    def one(x: Any) -> PyTree:
        return x.astype(dtype) if jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating) else x

    return jax.tree.map(one, tree)
