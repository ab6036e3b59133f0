"""The optimizer's update: of all parameters, or of a shard of each, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from two_replicas import AXIS, on_two, reduction_of, state_of

from jddp.engine.optimizer import PlacedOptimizer, Zero1, choose_optimizer
from jddp.engine.state import Replicated, Sharded
from jddp.engine.step import Placement
from jddp.engine.view import View, own_shards, view_of_shards
from jddp.ground.errors import ConfigError
from jddp.reduce.plan import BucketPlan
from jddp.reduce.shards import Flat

# Three numbers on two replicas: the last shard has one of padding.
PARAMS = {"w": np.float32([[10, 20, 30]] * 2), "b": np.float32([[5]] * 2)}
GRADS = {"w": np.float32([[1, 2, 3]] * 2), "b": np.float32([[4]] * 2)}
MOMENTUM = optax.sgd(2.0, momentum=0.5)
ALL_USED = BucketPlan(())
SHARDED = reduction_of(is_sharded=True)


def updated(optimizer, view, num_steps, plan=ALL_USED):
    """Parameters and optimizer state after some steps with the same gradients, by replica."""

    def replica(params, grads):
        state = state_of(params, opt_state=optimizer.init(params, params))
        grads = own_shards(grads, AXIS) if view.differs else grads
        for _ in range(num_steps):
            params, opt_state = optimizer.update(grads, state, plan, view, jnp.float32(0))
            state = state.replace(params=params, opt_state=opt_state)
        return state.params, state.opt_state

    return on_two(replica, PARAMS, GRADS)


def test_each_replica_updates_all_parameters():
    params, _ = updated(PlacedOptimizer(optax.sgd(2.0), "zero", 1, Placement()), View(AXIS), 1)
    assert params["w"].tolist() == [[8, 16, 24]] * 2
    assert params["b"].tolist() == [[-3]] * 2


def test_updates_of_shards_give_the_numbers_of_the_whole_update_on_every_replica():
    whole, _ = updated(PlacedOptimizer(MOMENTUM, "zero", 1, Placement()), View(AXIS), 3)
    params, opt_state = updated(
        Zero1(MOMENTUM, "zero", 1, Placement(), SHARDED, Flat(AXIS, 2)), view_of_shards(AXIS), 3
    )
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    # Its state is of the replica's shard: two numbers of three, with padding.
    assert opt_state[0].trace["w"].tolist() == [[1.75, 3.5], [5.25, 0]]


def test_arrays_of_a_sharded_optimizer_s_state_are_sharded_and_scalars_are_not():
    shapes = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
    layouts = Zero1(optax.adam(1.0), "zero", 1, Placement(), SHARDED, Flat(AXIS, 2)).layouts(shapes)
    assert jax.tree.leaves(layouts) == [Replicated(), Sharded((3,)), Sharded((3,))]
    layouts = PlacedOptimizer(optax.adam(1.0), "zero", 1, Placement()).layouts(shapes)
    assert jax.tree.leaves(layouts) == [Replicated()] * 3


@pytest.mark.parametrize("sharded_by", [None, SHARDED])
def test_an_optimizer_that_accumulates_is_refused_beside_micro_batches(sharded_by):
    tx = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    params = {"w": jnp.ones(3)}
    if sharded_by is None:
        choose_optimizer(tx, "zero", 1, Placement(), 2).check(params)
    with pytest.raises(ConfigError, match=r"optax\.MultiSteps beside accumulate_steps"):
        choose_optimizer(tx, "zero", 2, Placement(), 2, sharded_by).check(params)


def test_parameters_without_a_gradient_are_moved_left_alone_or_refused():
    plan, view = BucketPlan((), unused=("w",)), View(AXIS)
    decayed = optax.chain(optax.add_decayed_weights(1.0), optax.sgd(1.0))
    moved, _ = updated(PlacedOptimizer(decayed, "zero", 1, Placement()), view, 1, plan)
    alone, _ = updated(PlacedOptimizer(decayed, "skip", 1, Placement()), view, 1, plan)
    assert moved["w"].tolist() == [[-1, -2, -3]] * 2
    assert alone["w"].tolist() == PARAMS["w"].tolist()
    assert moved["b"].tolist() == alone["b"].tolist() == [[-4]] * 2
    for policy in ("zero", "skip"):
        PlacedOptimizer(decayed, policy, 1, Placement()).check_used(plan)
    with pytest.raises(ConfigError, match="^No gradient reaches w"):
        PlacedOptimizer(decayed, "error", 1, Placement()).check_used(plan)


def test_the_loss_is_passed_to_optimizers_that_ask_for_it():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda x: x * 0 - value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = PlacedOptimizer(tx, "zero", 1, Placement())

    def replica(params, grads):
        view, loss = View(AXIS), jnp.float32(4)
        return optimizer.update(grads, state_of(params), ALL_USED, view, loss)[0]

    assert on_two(replica, PARAMS, GRADS)["w"].tolist() == [[6, 16, 26]] * 2
