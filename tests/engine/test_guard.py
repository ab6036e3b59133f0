"""The guard decides which steps count, the same on every replica, and the loss scale."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from two_replicas import AXIS, on_two, state_of

from jddp.engine.guard import GROWTH_INTERVAL, Guard, limited
from jddp.engine.state import CommState
from jddp.engine.view import View, view_of_shards

NAN, INF = np.nan, np.inf
NEVER = Guard(8.0, lambda path, x: False)
SKIPPING = Guard(1.0, lambda path, x: False, skips=True)
DYNAMIC = Guard(2.0**16, lambda path, x: False, follows_overflows=True)
COUNTS, SKIPPED = [8, 3, 5, 1], [7, 2, 5, 2]


def accept(guard, grads, *, view=None, limit=None, before=2.0, after=3.0, scale=()):
    """Params, other state, step and skipped after the fifth step, and metrics, by replica."""

    def replica(grad):
        first = state_of({"w": jnp.float32(7)}, step=jnp.int32(4), skipped=jnp.int32(1))
        kept = {"m": jnp.float32(before)}
        first = first.replace(model_state=kept, comm_state=CommState(loss_scale=scale))
        new = first.replace(step=first.step + 1, params={"w": jnp.float32(8)})
        new = new.replace(model_state={"m": jnp.float32(after)})
        state, metrics = guard.accept(first, new, (jnp.float32(0), grad), view or View(AXIS))
        state, more = limited(limit, first, state, jnp.float32(0))
        read = state.params["w"], state.model_state["m"], state.step, state.skipped
        read = jnp.stack([jnp.float32(x) for x in read])
        return read, metrics | more, state.comm_state.loss_scale

    return on_two(replica, np.float32(grads))


@pytest.mark.parametrize(
    "guard, grads, options, want",
    [
        (NEVER, [NAN, NAN], {}, COUNTS),
        (SKIPPING, [1, 1], {}, COUNTS),
        (SKIPPING, [-INF, -INF], {}, SKIPPED),
        (SKIPPING, [1, NAN], {"view": view_of_shards(AXIS)}, SKIPPED),
        (SKIPPING, [1, 1], {"after": NAN}, SKIPPED),
        (SKIPPING, [1, 1], {"limit": 0.0}, COUNTS),
        (SKIPPING, [1, 1], {"limit": -0.5}, SKIPPED),
        (NEVER, [1, 1], {"limit": -0.5}, SKIPPED),
    ],
)
def test_a_step_counts_unless_a_number_of_any_replica_is_not_finite_or_its_loss_too_large(
    guard, grads, options, want
):
    assert (accept(guard, grads, **options)[0] == want).all()


def test_state_that_was_nan_before_skips_no_step():
    assert accept(SKIPPING, [1, 1], before=NAN, after=NAN)[0][:, 0].tolist() == [8, 8]


@pytest.mark.parametrize(
    "grad, options, num_good, want, want_good",
    [
        (1, {}, 0, 2.0**16, 1),
        (1, {}, GROWTH_INTERVAL - 1, 2.0**17, 0),
        (INF, {}, 5, 2.0**15, 0),
        (INF, {"limit": 1.0}, 5, 2.0**15, 0),
        (1, {"after": NAN}, 5, 2.0**16, 6),  # no scale helps what the forward pass writes
    ],
)
def test_a_dynamic_scale_halves_at_an_overflow_and_doubles_after_many_good_steps(
    grad, options, num_good, want, want_good
):
    scale = dataclasses.replace(DYNAMIC.init(), num_good=jnp.int32(num_good))
    _, metrics, left = accept(DYNAMIC, [grad, grad], scale=scale, **options)
    assert (left.scale == want).all()
    assert (left.num_good == want_good).all()
    assert (metrics["loss_scale"] == 2.0**16).all()  # of this step
