"""Norms of each layer: where numbers went wrong first, or will next."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jddp.gradients import mean_gradients
from jddp.mesh import AXIS
from jddp.recipe import Recipe
from jddp.reduce import BucketPlan
from jddp.state import TrainState, enter, specs
from jddp.step import over_replicas

PyTree = Any
Layers = dict[str, dict[str, float]]


def diagnose(
    recipe: Recipe,
    plan: BucketPlan,
    mesh: Mesh,
    kinds: TrainState,
    state: TrainState,
    batch: PyTree,
) -> Layers:
    """Runs a step as far as its averaged gradients, and measures them beside the parameters.

    Args:
      recipe: What the step is made of.
      plan: Its buckets.
      mesh: Where it runs.
      kinds: Of the state's leaves.
      state: What the step begins with; it is not changed.
      batch: Rows on the mesh.

    Returns:
      For each parameter, by its path: "parameter" and "gradient", which are norms, and
      "not_finite", how many numbers of the gradient are not.
    """

    def replica(state: TrainState, batch: PyTree) -> PyTree:
        state = enter(state, kinds)
        grads, *_ = mean_gradients(recipe, plan, state, batch)
        return jax.tree.map(_measure, state.params, grads)

    run = jax.jit(over_replicas(replica, mesh, (specs(kinds, AXIS), P(AXIS)), P()))
    layers: Layers = {}
    for path, value in jax.tree_util.tree_leaves_with_path(jax.device_get(run(state, batch))):
        *names, what = (jax.tree_util.keystr((key,), simple=True) for key in path)
        layers.setdefault("/".join(names), {})[what] = float(value)
    return layers


def _measure(param: Array, grad: Array) -> dict[str, Float[Array, ""]]:
    return {
        "parameter": _norm(param),
        "gradient": _norm(grad),
        "not_finite": (~jnp.isfinite(grad)).sum(dtype=jnp.float32),
    }


def _norm(x: Array) -> Float[Array, ""]:
    return jnp.sqrt(jnp.square(jnp.abs(x).astype(jnp.float32)).sum())
