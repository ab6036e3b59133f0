"""The table of `Units`: a step of 1,000 entries, whose summed loss has a gradient of 1,000."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from two_replicas import on_two, state_of

import jddp
from jddp.engine.guard import unscaled
from jddp.engine.micro_batches import MicroBatches
from jddp.engine.state import Inputs
from jddp.modules.functional import functional
from jddp.modules.metrics import mean_tree
from jddp.reduce.packing import bucketed
from jddp.reduce.reducer import make_reducer

POWER = 2.0**-10


class Times(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.param("w", nn.initializers.ones, ()).astype(x.dtype) * x


@pytest.mark.parametrize(
    "dtype, loss_scale, backward_scale, start, wire, wire_scale, seen, seen_scale",
    [
        ("float32", None, 1, 1, 1000, 1 / 1000, 1000, 1 / 1000),
        ("float16", None, POWER, POWER, 1000 * POWER, 1.024, 1000 * POWER, 1.024),
        ("float32", 1024, POWER, 1, 1000, 1.024, 1000, 1 / 1000),
        ("float16", 1024, POWER, 1, 1000, 1.024, 1000 * POWER, 1.024),
    ],
)
def test_the_table_of_units(
    dtype, loss_scale, backward_scale, start, wire, wire_scale, seen, seen_scale
):
    is_scaled, found = loss_scale is not None, {}
    backward = MicroBatches(
        functional(Times()), lambda model, batch: model(batch["x"]), 1, is_scaled=is_scaled
    )

    def note(bucket, state, axis):
        found["seen"] = bucket.scale
        return jax.tree.map(lambda x: x * 1, bucket), state + bucket.values[0].astype(jnp.float32)

    packed = bucketed("leaf", jddp.CommHook(lambda plan: jnp.zeros(()), note))
    seen_by = {"seen": unscaled} if is_scaled else {}
    reduction = make_reducer("data", packed, (64,), None, **seen_by)

    def replica(x):
        state = state_of({"w": jnp.ones((), dtype)})
        local = backward(state, Inputs({"x": x}), state.key, lambda state: loss_scale or 1.0)
        grads, units, plan = local.grads.tree(), local.units, reduction.plan(state.params)
        found["units"] = units
        reduced, given = reduction(local.grads, jnp.zeros(()), plan, units)
        mean = mean_tree(reduced, local.count * units.cotangent)
        return grads["w"].astype(jnp.float32), given, mean["w"].astype(jnp.float32)

    sent, given, mean = on_two(replica, np.ones((2, 1000), np.float32))
    units = found["units"]
    assert (units.backward_scale, units.cotangent) == (backward_scale, start)
    assert (sent[0], units.bucket_scale) == (wire, wire_scale)
    assert (given[0], found["seen"]) == (seen, seen_scale)
    assert mean[0] == 1
