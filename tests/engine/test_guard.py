"""The guard decides which steps count, the same on every replica, and the loss scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_replicas import AXIS, on_two, state_of

from jddp.engine.guard import GROWTH_INTERVAL, Guard, LossScale, limited
from jddp.engine.state import CommState
from jddp.engine.view import View, view_of_shards

NAN, INF = np.nan, np.inf
NEVER = Guard(8.0, lambda path, x: False)
SKIPPING = Guard(1.0, lambda path, x: False, skips=True)
DYNAMIC = Guard(2.0**16, lambda path, x: False, follows_overflows=True)


def states(before=2.0, after=3.0, scale=()):
    """A state before the fifth step and after it; other state may be given."""
    comm_state = CommState(loss_scale=scale)
    first = state_of({"w": jnp.float32(7)}, step=jnp.int32(4), skipped=jnp.int32(1))
    first = first.replace(model_state={"m": jnp.float32(before)}, comm_state=comm_state)
    changed = {"w": jnp.float32(8)}, {"m": jnp.float32(after)}
    return first, first.replace(step=first.step + 1, params=changed[0], model_state=changed[1])


def accept(guard, grads, view=None, limit=None, **options):
    """Params, other state, step and skipped after the fifth step, and metrics, by replica."""

    def replica(grad):
        before, after = states(**options)
        numbers = jnp.float32(0), grad
        state, metrics = guard.accept(before, after, numbers, view or View(AXIS))
        state, more = limited(limit, before, state, numbers[0])
        metrics |= more
        scale = state.comm_state.loss_scale
        read = state.params["w"], state.model_state["m"], state.step, state.skipped
        return jnp.stack([jnp.float32(x) for x in read]), metrics, scale

    return on_two(replica, np.float32(grads))


def test_without_a_guard_every_step_counts():
    (got, metrics, _), before = accept(NEVER, [NAN, NAN]), states()[0]
    assert (got == [8, 3, 5, 1]).all()
    assert (metrics, NEVER.scale(before), NEVER.init()) == ({}, 8.0, ())


def test_a_step_of_finite_numbers_counts():
    got, metrics, _ = accept(SKIPPING, [1, 1])
    assert (got == [8, 3, 5, 1]).all()
    assert metrics["skipped"].tolist() == [1, 1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_step_that_is_not_finite_changes_nothing_but_counts(bad):
    got, metrics, _ = accept(SKIPPING, [bad, bad])
    assert (got == [7, 2, 5, 2]).all()
    assert metrics["skipped"].tolist() == [2, 2]


def test_where_replicas_hold_shards_the_shard_of_one_skips_the_step_of_all():
    assert (accept(SKIPPING, [1, NAN], view_of_shards(AXIS))[0] == [7, 2, 5, 2]).all()


def test_where_replicas_keep_their_own_state_that_of_one_skips_the_step_of_all():
    guard = Guard(1.0, lambda path, x: True, skips=True)

    def replica(own):
        before, after = states()
        after = after.replace(model_state={"m": own})
        return guard.accept(before, after, own * 0 + 1, View(AXIS))[0].skipped

    assert on_two(replica, np.float32([1, 2])).tolist() == [1, 1]
    assert on_two(lambda own: replica(jnp.where(own > 1, NAN, 1)), np.float32([1, 2])).max() == 2


def test_other_state_that_becomes_nan_skips_a_step_and_what_was_nan_before_does_not():
    assert (accept(SKIPPING, [1, 1], after=NAN)[0] == [7, 2, 5, 2]).all()
    got = accept(SKIPPING, [1, 1], before=NAN, after=NAN)[0]
    assert got[:, 0].tolist() == [8, 8]


@pytest.mark.parametrize(
    "grad, after, num_good, want, want_good",
    [
        (1, 3, 0, 2.0**16, 1),
        (1, 3, GROWTH_INTERVAL - 1, 2.0**17, 0),
        (INF, 3, 5, 2.0**15, 0),
        (1, NAN, 5, 2.0**16, 6),  # A smaller scale does not help what the forward pass writes.
    ],
    ids=["good", "long good", "overflow", "nan in other state"],
)
def test_a_dynamic_scale_halves_at_an_overflow_and_doubles_after_many_good_steps(
    grad, after, num_good, want, want_good
):
    scale = dataclasses.replace(DYNAMIC.init(), num_good=jnp.int32(num_good))
    _, metrics, left = accept(DYNAMIC, [grad, grad], after=after, scale=scale)
    assert (left.scale == want).all()
    assert (left.num_good == want_good).all()
    assert (metrics["loss_scale"] == 2.0**16).all()  # of this step


def test_a_step_starts_from_the_scale_that_the_last_one_has_left():
    before, _ = states(scale=LossScale(jnp.float32(4), jnp.int32(0)))
    assert DYNAMIC.scale(before) == 4
    assert jax.tree.leaves(DYNAMIC.init()) == [2.0**16, 0]


@pytest.mark.parametrize("guard, scale", [(NEVER, ()), (SKIPPING, ())])
@pytest.mark.parametrize("limit, counts", [(INF, 1), (0.0, 1), (-0.5, 0), (None, 1)])
def test_a_step_counts_up_to_the_limit_of_its_loss_which_is_zero(guard, scale, limit, counts):
    got, _, _ = accept(guard, [1, 1], limit=limit, scale=scale)
    assert (got == ([8, 3, 5, 1] if counts else [7, 2, 5, 2])).all()


def test_a_limit_leaves_the_loss_scale_of_a_step_that_overflows_to_its_guard():
    first = LossScale(jnp.float32(8), jnp.int32(5))
    got, metrics, scale = accept(DYNAMIC, [INF, INF], limit=1.0, scale=first)
    assert (got == [7, 2, 5, 2]).all()
    assert (scale.scale.tolist(), metrics["loss_scale"].tolist()) == ([4, 4], [8, 8])
