"""Replicas synchronize in each step, or after several that each takes alone."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from two_replicas import AXIS, local_of, on_two, reduction_of, state_of

from jddp.engine.state import CommState, PerReplica, Replicated
from jddp.engine.step import EveryStep
from jddp.engine.strategy import LocalSteps
from jddp.engine.view import View
from jddp.ground.errors import ConfigError

REDUCTION = reduction_of()
GRADS = np.float32([1, 3])


def mean(sync, step):
    """The gradient and the count that each replica uses in a step."""

    def replica(grad, count):
        state, local = state_of({"w": grad}, step=jnp.int32(step)), local_of({"w": grad}, count)
        grads, _ = sync.mean(REDUCTION, REDUCTION.plan({"w": grad}), local, state)
        return grads["w"], sync.count(state, local.count, jnp.float32(6))

    return [x.tolist() for x in on_two(replica, GRADS, np.float32([4, 8]))]


def settled(sync, step, params, *, skipped=0, count=(1, 1), start=0.0):
    """Parameters of each replica, and outer ones, after a step that made `params` of zeros."""

    def replica(w, count):
        outer = sync.init({"w": jnp.float32(start)})
        before = state_of({"w": w * 0}, step=jnp.int32(step), skipped=jnp.int32(skipped))
        before = before.replace(comm_state=CommState(outer=outer))
        after = before.replace(params={"w": w}, step=before.step + 1)
        after = sync.settle(REDUCTION, local_of({"w": w}, count), before, after)
        return after.params["w"], after.comm_state.outer

    own, outer = on_two(replica, np.float32(params), np.float32(count))
    return own.tolist(), outer["params"]["w"].tolist() if outer else None


def test_in_each_step_gradients_become_their_mean_and_nothing_is_left_to_settle():
    assert mean(EveryStep(), step=0) == [[2, 2], [6, 6]]
    assert settled(EveryStep(), 0, [5, 7]) == ([5, 7], None)
    view = View(AXIS)
    assert EveryStep().view(view) is view


def test_in_local_steps_each_replica_keeps_its_gradient_and_divides_by_its_own_count():
    assert mean(LocalSteps(2), step=0) == [[1, 3], [4, 8]]
    assert LocalSteps(2).view(View(AXIS)) == View(AXIS, is_mean=False)


def test_the_first_steps_are_plain_if_a_start_is_given():
    sync = LocalSteps(2, start=3)
    assert mean(sync, step=2) == [[2, 2], [6, 6]]
    assert mean(sync, step=3) == [[1, 3], [4, 8]]
    # Outer parameters follow without a message.
    assert settled(sync, 2, [8, 8]) == ([8, 8], [8, 8])


@pytest.mark.parametrize(
    "step, skipped, is_due",
    [(0, 0, False), (1, 0, True), (2, 0, False), (2, 1, True), (3, 0, True)],
)
def test_parameters_become_their_mean_after_so_many_steps_that_were_not_skipped(
    step, skipped, is_due
):
    want = ([6, 6], [6, 6]) if is_due else ([5, 7], [0, 0])
    assert settled(LocalSteps(2), step, [5, 7], skipped=skipped) == want


def test_a_replica_without_a_valid_entry_keeps_its_parameters():
    assert settled(LocalSteps(2), 0, [5, 7], count=(0, 1))[0] == [0, 7]


def test_the_outer_optimizer_takes_the_mean_difference_for_a_gradient():
    # From 8 the replicas have moved to 5 and 7: the mean difference is 2.
    assert settled(LocalSteps(1, optax.sgd(3.0)), 0, [5, 7], start=8.0) == ([2, 2], [2, 2])


def test_what_differs_between_outer_steps_is_per_replica():
    state = state_of({"w": jnp.ones(2), "n": jnp.int32(0)}, opt_state=jnp.ones(2))
    everywhere = state.replace(params={"w": Replicated(), "n": Replicated()})
    assert EveryStep().layouts(state, everywhere) is everywhere
    layouts = LocalSteps(2).layouts(state, everywhere)
    assert layouts.params == {"w": PerReplica(), "n": Replicated()}
    assert layouts.opt_state == PerReplica()


def test_state_on_which_replicas_would_have_to_agree_is_refused_between_outer_steps():
    model_state = {"mean": jnp.ones(2), "n": jnp.int32(0)}
    for sync in (EveryStep(), LocalSteps(2)):
        sync.check(model_state, lambda path, x: True)
    EveryStep().check(model_state, lambda path, x: False)
    with pytest.raises(ConfigError, match="have to agree on 'mean' in each step"):
        LocalSteps(2).check(model_state, lambda path, x: False)


def test_a_plan_shows_how_often_it_is_sent():
    plan = REDUCTION.plan({"w": jnp.ones(2)})
    assert EveryStep().note(plan) == EveryStep().sent(REDUCTION, plan, {}) == plan
    note = LocalSteps(4, start=2).sent(REDUCTION, plan, {"w": jnp.ones(2)}).notes[-1]
    assert note == "LocalSteps: sent every 4 steps, and in each of the first 2"
    assert (EveryStep().every, LocalSteps(4).every) == (None, 4)


def test_numbers_out_of_range_are_refused():
    for options in ({"every": 0}, {"every": 2, "start": -1}):
        with pytest.raises(ConfigError, match="every is at least 1 and start at least 0"):
            LocalSteps(**options)
