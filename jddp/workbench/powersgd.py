"""PowerSGD: gradients are sent as two thin factors; the rest is sent later.

    reduction = jddp.Reduction(hook=jddp.powersgd(rank=2))

A gradient of m x n numbers is a matrix M, and each replica has its own M. With the Q of the step
before, of r columns of n numbers,

    P = the mean over replicas of M Q, made orthonormal      m r numbers on the wire
    Q = the mean of M^T P                                    n r numbers
    P Q^T is the gradient; M - P Q^T is added to this replica's next M

so that from step to step P and Q come nearer to the largest singular vectors of the mean of M.
"""

import functools
import math
from dataclasses import dataclass
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from jddp.ground.errors import ConfigError
from jddp.ground.typing import Tree
from jddp.reduce.hooks import CommHook, GradBucket, mean_over
from jddp.reduce.plan import Bucket, BucketPlan


class State(TypedDict, total=False):
    """The state that a replica keeps between steps and in checkpoints, by the paths of leaves."""

    step: Array
    unsent: dict[str, Array]
    q: dict[str, Array]


# Rounding leaves this fraction of a column in the span of the earlier columns: it is no direction.
ROUNDING = 1e-5

# Products need full float32: the default on GPUs may be TF32, whose rounding exceeds `ROUNDING`.
_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def powersgd(
    rank: int = 1,
    *,
    start_step: int = 1000,
    min_compression_rate: float = 2.0,
    error_feedback: bool = True,
    warm_start: bool = True,
) -> CommHook:
    """Returns a hook that sends matrices of low rank in place of gradients.

    A leaf of two or more dims is a matrix of its last dim and all others. In Flax the last dim of a
    kernel are the features that a layer returns, and the others are the features that it takes.
    Leaves of fewer dims, complex leaves, and leaves that would not become small enough are sent
    exactly. A bucket costs two collectives: one for its exact leaves and each P, one for each Q.

    The hook state of a replica is the error of compression that it has not sent, in float32, as
    large as the parameters. It is kept as a gradient of the replica's mean loss, and so keeps its
    weight for any number of rows in the next step. On another number of replicas each begins with
    the mean of all states: the sum of all applied gradients, plus the mean error, stays the sum
    of all gradients. Masked entries count in that weight: in a batch that is mostly masked, the
    error weighs more than its rows do.

    Args:
      rank: Number of columns of P and Q.
      start_step: Number of exact steps before the first compressed step: gradients change most in
        the beginning. PyTorch demands two steps for a hook with state, since its buckets change
        after the first. Here buckets are planned before the first step, and 0 is enough. With any
        other number a bucket is sent in a branch, and XLA hides no branch behind the backward pass.
      min_compression_rate: Factor by which fewer numbers must be sent for a leaf to be compressed.
      error_feedback: Whether the error of compression is kept, and sent later.
      warm_start: Whether Q begins with the last step's Q, and not with random numbers.

    Raises:
      ConfigError: If an option breaks its rule.

    References:
      Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization", NeurIPS 2019, algorithms 1 and 2. https://arxiv.org/abs/1905.13727. Here any
      optimizer comes after the hook; there, momentum is applied to decompressed gradients.
    """
    counts = isinstance(rank, int) and isinstance(start_step, int) and rank >= 1 and start_step >= 0
    if not (counts and min_compression_rate > 0):
        raise ConfigError(
            f"powersgd: got rank={rank}, start_step={start_step}, min_compression_rate="
            f"{min_compression_rate}. Give whole numbers from 1 and from 0 on, and a rate above 0."
        )
    hook = _PowerSGD(rank, start_step, min_compression_rate, error_feedback, warm_start)
    return CommHook(hook.init, hook.powersgd, on_resize="mean")


@dataclass(frozen=True)
class _PowerSGD:
    rank: int
    start_step: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool

    def init(self, plan: BucketPlan) -> State:
        sides = {path: s for bucket in plan.buckets for path, s in self._matrices(bucket).items()}
        state: State = {"step": jnp.int32(0)}
        if self.error_feedback:
            state["unsent"] = {path: jnp.zeros(x[:2], jnp.float32) for path, x in sides.items()}
        if self.warm_start:
            state["q"] = {path: jnp.zeros(x[1:], jnp.float32) for path, x in sides.items()}
        return state

    def powersgd(self, bucket: GradBucket, state: State, axis: str) -> tuple[GradBucket, State]:
        """The `reduce` of the hook; its name stands in reports."""
        if not self._matrices(bucket.planned):
            bucket = mean_over(axis, bucket)
        elif self.start_step == 0:
            bucket, state = self._compress(axis, bucket, state)
        else:
            # The count of steps is the same on every replica, so all take one branch. If some did
            # not, they would wait forever for each other's collectives.
            begins = state["step"] >= self.start_step
            compress = functools.partial(self._compress, axis)
            bucket, state = jax.lax.cond(
                begins, compress, lambda b, s: (mean_over(axis, b), s), bucket, state
            )
        return bucket, {**state, "step": state["step"] + int(bucket.is_last)}

    def _matrices(self, planned: Bucket) -> dict[str, tuple[int, int, int]]:
        """Rows, columns and rank of the leaves that are compressed, by their paths."""
        sides = {}
        for path, shape in zip(planned.paths, planned.shapes, strict=True):
            if len(shape) > 1 and jnp.issubdtype(planned.dtype, np.floating):
                m, n = math.prod(shape[:-1]), shape[-1]
                r = min(self.rank, m, n)
                if r * (m + n) * self.min_compression_rate < m * n:
                    sides[path] = m, n, r
        return sides

    def _compress(self, axis: str, bucket: GradBucket, state: State) -> tuple[GradBucket, State]:
        sides, scale = self._matrices(bucket.planned), bucket.scale
        leaves = dict(zip(bucket.planned.paths, bucket.leaves, strict=True))
        exact = {path: leaf for path, leaf in leaves.items() if path not in sides}
        # M is in units of the replica's mean loss: a sum over rows would weigh the kept error by
        # the number of rows of its step.
        m = {path: _wide(leaves[path]).reshape(x[:2]) * scale for path, x in sides.items()}
        if self.error_feedback:
            m = {path: x + state["unsent"][path] for path, x in m.items()}
        drawn = self._draw(state["step"], sides)
        q = {path: self._columns(state, path, x) for path, x in drawn.items()}

        dtype = bucket.values[0].dtype  # The dtype on the wire.
        p = {path: _product(x, q[path]).astype(dtype) for path, x in m.items()}
        # One vector holds all factors and exact leaves: each array by itself would cost a latency.
        p, exact = _mean_as_one(axis, (p, exact))
        p = {path: _orthonormal(_wide(x)) for path, x in p.items()}
        q = {path: _product(x.T, p[path]).astype(dtype) for path, x in m.items()}
        q = jax.tree.map(_wide, _mean_as_one(axis, q))
        got = {path: (_product(p[path], q[path].T) / scale).astype(dtype) for path in sides}

        if self.error_feedback:
            # The gradient for the optimizer is subtracted: rounding on the wire is sent later, too.
            unsent = {path: x - _wide(got[path]) * scale for path, x in m.items()}
            state = {**state, "unsent": state["unsent"] | unsent}
        if self.warm_start:
            state = {**state, "q": state["q"] | q}
        leaves |= exact | {path: x.reshape(leaves[path].shape) for path, x in got.items()}
        return bucket.with_leaves([*leaves.values()]), state

    def _draw(self, step: Array, sides: dict[str, tuple[int, int, int]]) -> dict[str, Array]:
        """Draws a random Q for each leaf: another at each step, the same on every replica.

        One array serves all leaves of a bucket: each call is some hundred operations in a program.
        """
        # threefry's numbers are the same under `vmap`; the default generator's need not be.
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), step)
        numbers = jax.random.normal(key, (max(n for _, n, _ in sides.values()), self.rank))
        return {path: numbers[:n, :r] for path, (_, n, r) in sides.items()}

    def _columns(self, state: State, path: str, columns: Array) -> Float[Array, "n r"]:
        """The Q that a leaf begins with: the kept one, with random columns in place of zeros."""
        if self.warm_start:
            before = state["q"][path]
            columns = jnp.where((before == 0).all(axis=0, keepdims=True), columns, before)
        return _unit(columns)


def _mean_as_one(axis: str, tree: Tree) -> Tree:
    """The mean over the replicas, taken of one vector with all arrays."""
    vector, unravel = ravel_pytree(tree)
    return unravel(mean_over(axis, vector))


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _unit(x: Float[Array, "n r"]) -> Float[Array, "n r"]:
    """Scales columns to length 1; a column of zeros stays zero."""
    # A gradient of zeros must give zeros, and not 0 / 0 on every replica.
    length = jnp.linalg.norm(x, axis=0, keepdims=True)
    return x / jnp.where(length == 0, 1, length)


def _orthonormal(x: Float[Array, "m r"]) -> Float[Array, "m r"]:
    """An orthonormal basis of the columns, by Gram and Schmidt; zeros where one adds nothing.

    Each column is projected twice, since the first time leaves rounding in the earlier directions
    (Giraud, Langou and Rozloznik, 2005). A column of rounding would send noise; zeros send nothing.
    """

    def add_column(i: Array, done: Array) -> Array:
        column = jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)
        rest = column - _product(done, _product(done.T, column))
        adds_nothing = jnp.linalg.norm(rest) <= ROUNDING * jnp.linalg.norm(column)
        rest = _unit(jnp.where(adds_nothing, 0, rest))
        rest = _unit(rest - _product(done, _product(done.T, rest)))
        return jax.lax.dynamic_update_slice_in_dim(done, rest, i, axis=1)

    return jax.lax.fori_loop(0, x.shape[1], add_column, jnp.zeros_like(x))
