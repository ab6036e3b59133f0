"""A moving average follows the parameters, on each replica those that it holds."""

import jax.numpy as jnp
import numpy as np
import optax
from two_replicas import on_two, state_of

from jddp.engine.evaluation import optimizer_params
from jddp.engine.guard import Average
from jddp.engine.state import by_path


def moved(average, params, before):
    """The average after a step that has left these parameters."""

    def step(w, e):
        state = state_of(w, ema_params=e)
        return average(state, state).ema_params

    return on_two(step, params, before)


def test_without_an_average_nothing_is_kept():
    assert Average(None).init(state_of({"w": jnp.ones(2)})).ema_params is None
    one, other = state_of({"w": jnp.ones(2)}), state_of({"w": jnp.zeros(2)})
    assert Average(None)(one, other) is other


def test_it_moves_towards_the_parameters_by_what_decay_leaves():
    assert moved(Average(0.75), np.float32([8, 8]), np.float32([4, 4])).tolist() == [5, 5]


def test_replicas_with_parameters_of_their_own_have_averages_of_their_own():
    assert moved(Average(0.5), np.float32([2, 6]), np.float32([0, 4])).tolist() == [1, 5]


def test_it_is_kept_in_float32_where_parameters_are_narrower():
    narrow = {"w": jnp.ones(2, jnp.bfloat16)}
    first = Average(0.5).init(state_of(narrow, model_state=narrow))
    assert first.ema_params["w"].dtype == first.ema_state["w"].dtype == jnp.float32
    # Between 256 and 258 bfloat16 has no number.
    params = jnp.full(2, 256, jnp.bfloat16)
    assert moved(Average(0.5), params, np.float32([258, 258])).tolist() == [257] * 2


def test_sam_is_evaluated_with_the_parameters_before_its_adversarial_step():
    uphill = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
    tx = optax.chain(optax.contrib.sam(optax.sgd(0.25), uphill))
    params = {"w": jnp.float32([3, 4])}
    opt_state = tx.init(params)
    for stepped, evaluated in (([3.3, 4.4], [3, 4]), ([2.175, 2.9], [2.175, 2.9])):
        grads = params  # of half the squares; the second from the adversarial parameters
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], stepped, rtol=1e-6)
        found = optimizer_params(params, by_path(opt_state))["w"]
        np.testing.assert_allclose(found, evaluated, rtol=1e-6)


def test_parameters_that_have_the_names_of_such_a_state_are_evaluated_as_they_are():
    params = {name: jnp.ones(2) for name in ("z", "b1", "weight_sum", "cache", "steps_since_sync")}
    kept = by_path(optax.adam(0.1).init(params))
    assert optimizer_params(params, kept).keys() == params.keys()
    assert all((x == 1).all() for x in optimizer_params(params, kept).values())


def test_it_moves_with_the_updates_of_an_optimizer_that_accumulates():
    """By hand: two updates in four steps, and not four decays."""
    tx = optax.MultiSteps(optax.sgd(1.0), 2)
    params, average = {"w": jnp.float32(8)}, Average(0.5)
    state = average.init(state_of(params, opt_state=tx.init(params)))
    for want in (8, 6, 6, 3):  # of 8, 4, 4, 0
        updates, opt_state = tx.update({"w": jnp.float32(4)}, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = average(state, state.replace(params=params, opt_state=opt_state))
        assert state.ema_params["w"] == want
