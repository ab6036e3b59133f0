"""The backward pass of a replica: its rows in micro-batches, and when gradients leave."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from two_replicas import on_two, reduction_of, state_of

from jddp.engine.micro_batches import MicroBatches
from jddp.engine.state import Inputs
from jddp.ground.errors import ConfigError
from jddp.modules.functional import functional

# Rows of each replica: of w * x the gradient is the sum of the valid rows.
X = np.float32([[1, 2, 3, 4], [10, 20, 30, 40]])
MASK = np.float32([[1, 1, 1, 1], [1, 1, 0, 0]])


class Times(nn.Module):
    """A number times the rows."""

    @nn.compact
    def __call__(self, x):
        return self.param("w", nn.initializers.ones, ()) * x


def loss_fn(model, batch):
    return model(batch["x"])


def run(num, *, overlaps, dtype=np.float32, scale=1.0, is_scaled=False, mode="sync"):
    """Gradients, total and count of each replica, and the units of the gradients."""
    model, units = functional(Times(), mode), []
    backward = MicroBatches(model, loss_fn, num, overlaps, is_scaled)

    def replica(x, mask):
        state = state_of({"w": jnp.ones((), dtype)})
        inputs = Inputs({"x": x.astype(dtype), "mask": mask})
        local = backward(state, inputs, state.key, lambda state: scale)
        units.append(local.units)
        loss = local.sums["loss"]
        return local.grads.tree()["w"], loss.total, loss.count

    return *on_two(replica, X, MASK), units[0]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("mode", ["sync", "local"])
def test_gradients_are_those_of_the_sum_over_valid_rows_however_they_are_run(num, overlaps, mode):
    grads, total, count, units = run(num, overlaps=overlaps, mode=mode)
    assert grads.tolist() == total.tolist() == [10, 30]
    assert count.tolist() == [4, 2]
    assert units.cotangent == 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_loss_scale_multiplies_gradients_of_the_mean_and_the_units_know(overlaps):
    grads, total, _, units = run(2, overlaps=overlaps, scale=8.0, is_scaled=True)
    # The pass starts from 8 / 4: four entries, masked ones counted.
    assert (grads.tolist(), total.tolist()) == ([20, 60], [10, 30])
    assert units.cotangent == 2


def test_gradients_of_half_precision_are_added_in_float32():
    """4,096 + 1 is no number of float16, and 4,096 + 1 + 1 + 2 is."""
    backward = MicroBatches(functional(Times()), loss_fn, 4)

    def replica(x):
        state = state_of({"w": jnp.ones((), jnp.float16)})
        local = backward(state, Inputs({"x": x.astype(jnp.float16)}), state.key, lambda state: 1.0)
        return local.grads.tree()["w"].astype(jnp.float32) / local.units.cotangent

    assert on_two(replica, np.float32([[4096, 1, 1, 2]] * 2)).tolist() == [4100] * 2


def test_the_pass_starts_from_a_power_of_two_that_keeps_a_sum_to_its_mean():
    params = {"w": jnp.ones((), jnp.float16)}
    plain, scaled = (MicroBatches(functional(Times()), loss_fn, 1, False, x) for x in (False, True))
    assert [plain.start(params, num) for num in (1, 2, 3, 1000)] == [1, 0.5, 0.25, 2**-10]
    assert plain.start({"w": jnp.ones(())}, 1000) == 1
    assert scaled.start({"w": jnp.ones(())}, 1000) == 2**-10


def test_a_plan_shows_when_buckets_leave():
    plan = reduction_of().plan({"w": jnp.ones(2)})
    after, inside = (MicroBatches(functional(Times()), loss_fn, 1, x) for x in (False, True))
    assert after.note(plan, 3).notes[-1].startswith("overlap off")
    assert inside.note(plan, 0).notes[-1].startswith("overlap on")
    assert inside.note(plan, 3).notes[-1].startswith("3 gradients leave a loop at once")


def test_there_is_at_least_one_micro_batch():
    with pytest.raises(ConfigError, match="accumulate_steps is at least 1; got 0"):
        MicroBatches(functional(Times()), loss_fn, 0)
