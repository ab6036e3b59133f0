"""Replicas: one on each device, or a fixed number of logical ones on any number of devices."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from two_replicas import AXIS, local_of, on_two, state_of

from jddp.engine.state import Inputs, PerReplica, Replicated
from jddp.engine.step import Devices
from jddp.ground.errors import ConfigError
from jddp.modules.metrics import Sum
from jddp.reduce.hooks import PLAIN
from jddp.workbench.logical_replicas import FixedReplicas

ROWS = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]])  # four on each device
MODEL = types.SimpleNamespace(keeps_own=lambda path, x: False)
DEVICES, LOGICAL = Devices(AXIS, MODEL), FixedReplicas(AXIS, MODEL, 4)


@dataclasses.dataclass(frozen=True)
class SumsOfRows:
    """A backward pass whose gradient is the sum of the rows, and a random number."""

    def __call__(self, state, inputs, key, loss_scale):
        grads = {"w": inputs.rows.sum(), "draw": jax.random.uniform(key)}
        local = local_of(grads, len(inputs.rows))
        loss = Sum(inputs.rows.sum() * loss_scale(state), local.count)
        return dataclasses.replace(local, sums={"loss": loss})

    def varying(self, state, inputs):
        return {}

    def units(self, params, sums, loss_scale):
        return PLAIN


def run(replicas):
    """Gradients of the devices by themselves, and sums and mean count over all replicas."""

    def replica(rows):
        local = replicas.run(SumsOfRows(), lambda state: 2.0, state_of({}), Inputs(rows))
        sums = replicas.sum(local.sums)
        return local.grads.tree(), sums["loss"].total, replicas.mean_count(sums)

    return on_two(replica, ROWS)


def test_a_device_runs_its_rows_as_one_replica_and_sums_are_over_all():
    grads, total, mean_count = run(DEVICES)
    assert grads["w"].tolist() == [10, 26]
    assert (total.tolist(), mean_count.tolist()) == ([72, 72], [4, 4])


def test_a_device_runs_its_logical_replicas_one_after_the_other_and_adds_in_pairs():
    grads, total, mean_count = run(LOGICAL)
    assert grads["w"].tolist() == [[10], [26]]  # a row: the sum of the device's two replicas
    assert (total.tolist(), mean_count.tolist()) == ([72, 72], [2, 2])


def test_each_replica_has_random_numbers_of_its_own():
    def draw(replica):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), replica)
        return jax.random.uniform(key)

    grads, *_ = run(DEVICES)
    assert grads["draw"].tolist() == [draw(0), draw(1)]
    grads, *_ = run(LOGICAL)
    np.testing.assert_allclose(grads["draw"][:, 0], [draw(0) + draw(1), draw(2) + draw(3)])


@pytest.mark.parametrize("replicas", [DEVICES, LOGICAL], ids=["devices", "logical"])
def test_an_evaluation_is_summed_over_all_rows_that_count(replicas):
    def evaluate(rows, valid, key):
        return {"loss": Sum((rows * valid).sum(), valid.sum())}

    def replica(rows, valid):
        return replicas.evaluate(evaluate, jax.random.key(0), rows, valid)["loss"]

    found = on_two(replica, ROWS, np.float32([[1, 1, 1, 1], [1, 0, 0, 0]]))
    assert (found.total.tolist(), found.count.tolist()) == ([15, 15], [5, 5])


@pytest.mark.parametrize("replicas", [DEVICES, LOGICAL], ids=["devices", "logical"])
def test_a_function_is_computed_whether_kept_apart_or_not(replicas):
    def replica(x):
        return replicas.separate(lambda x: {"y": x + 1, "key": jax.random.key(3)}, state_of({}), x)

    both = on_two(lambda x: replica(x)["y"], np.float32([1, 2]))
    assert both.tolist() == [2, 3]


def test_a_state_enters_and_leaves_with_a_row_for_each_replica():
    layouts, state = (
        {"a": Replicated(), "b": PerReplica()},
        {"a": jnp.ones(2), "b": jnp.ones((1, 3))},
    )
    entered = DEVICES.enter(state, layouts)
    assert jax.tree.map(np.shape, entered) == {"a": (2,), "b": (3,)}
    assert jax.tree.map(np.shape, DEVICES.leave(entered, layouts)) == jax.tree.map(np.shape, state)
    assert LOGICAL.enter(state, layouts) is LOGICAL.leave(state, layouts) is state


def test_logical_replicas_divide_over_the_devices():
    assert [x.total(2) for x in (DEVICES, LOGICAL)] == [2, 4]
    assert [x.num for x in (DEVICES, LOGICAL)] == [None, 4]
    with pytest.raises(ConfigError, match="LogicalReplicas"):
        FixedReplicas(AXIS, MODEL, 3).total(2)


def test_a_collective_in_the_model_is_refused_for_logical_replicas_alone():
    traced = []

    def replica(x):
        traced.append(jax.make_jaxpr(lambda x: lax.psum(x, AXIS))(x).jaxpr)
        return x

    on_two(replica, np.float32([1, 2]))
    DEVICES.check(traced[0])
    with pytest.raises(ConfigError, match="runs replicas one after the other"):
        LOGICAL.check(traced[0])


def test_a_jitted_function_gives_the_same_for_both():
    for replicas in (DEVICES, LOGICAL):
        assert replicas.jit(lambda x: x + x)(jnp.float32(2)) == 4
