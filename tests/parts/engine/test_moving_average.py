"""A moving average follows the parameters, on each replica those that it holds."""

import jax.numpy as jnp
import numpy as np
from two_replicas import on_two, state_of

from jddp.engine.moving_average import Ema, NoAverage, choose_average


def moved(average, params, before):
    """The average after a step that has left these parameters."""
    return on_two(lambda w, e: average(state_of(w, ema_params=e)).ema_params, params, before)


def test_without_an_average_nothing_is_kept():
    assert NoAverage().init(state_of({"w": jnp.ones(2)})).ema_params is None
    assert on_two(lambda w: NoAverage()(state_of(w)).params, np.float32([1, 2])).tolist() == [1, 2]
    assert choose_average(None) == NoAverage()


def test_it_moves_towards_the_parameters_by_what_decay_leaves():
    assert moved(Ema(0.75), np.float32([8, 8]), np.float32([4, 4])).tolist() == [5, 5]


def test_replicas_with_parameters_of_their_own_have_averages_of_their_own():
    assert moved(Ema(0.5), np.float32([2, 6]), np.float32([0, 4])).tolist() == [1, 5]


def test_it_is_kept_in_float32_where_parameters_are_narrower():
    narrow = {"w": jnp.ones(2, jnp.bfloat16)}
    first = Ema(0.5).init(state_of(narrow, model_state=narrow))
    assert first.ema_params["w"].dtype == first.ema_state["w"].dtype == jnp.float32
    # Between 256 and 258 bfloat16 has no number.
    params = jnp.full(2, 256, jnp.bfloat16)
    assert moved(Ema(0.5), params, np.float32([258, 258])).tolist() == [257] * 2
