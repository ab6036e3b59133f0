"""Layers with a field axis_name that normalize groups of rows: `verify` finds them."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from states import close
from tiny import Of, loss_fn, make_batch

import jddp

GROUP = 4


def normalized(x, size, axis_name):
    """Rows normalized in groups of a size, and statistics: the mean of those of the groups."""
    groups = x.reshape(-1, size or len(x), x.shape[-1])
    mean, square = groups.mean(1, keepdims=True), jnp.square(groups).mean(1, keepdims=True)
    if axis_name is not None:
        mean, square = jax.lax.pmean((mean, square), axis_name)
    var = square - jnp.square(mean)
    y = (groups - mean) * jax.lax.rsqrt(var + 1e-5)
    return y.reshape(x.shape), mean.mean((0, 1)), var.mean((0, 1))


class Ghost(nn.Module):
    """Ghost batch norm, as model libraries have it; of all rows where no size is given."""

    size: int | None = GROUP
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, use_running_average):
        kept = [
            self.variable("batch_stats", name, start, x.shape[-1:])
            for name, start in (("mean", jnp.zeros), ("var", jnp.ones))
        ]
        if use_running_average:
            return (x - kept[0].value[None]) * jax.lax.rsqrt(kept[1].value[None] + 1e-5)
        axis_name = None if self.is_initializing() else self.axis_name
        y, *new = normalized(x, self.size, axis_name)
        if not self.is_initializing():
            for variable, value in zip(kept, new, strict=True):
                variable.value = 0.9 * variable.value + 0.1 * value
        return y


def linen_net(size=GROUP):
    def body(m, x, train):
        return nn.Dense(4)(Ghost(size, name="norm")(x, use_running_average=not train))

    return Of(body)


def test_verify_finds_a_layer_that_normalizes_groups_of_rows_under_sync():
    report = jddp.verify(linen_net(), optax.sgd(0.1), loss_fn, make_batch(8 * GROUP), mesh=4)
    assert not report.passed


def test_with_local_statistics_it_is_exact():
    batch = make_batch(8 * GROUP)
    ends = []
    for mesh in (1, 4):
        ddp = jddp.DataParallel(linen_net(), optax.sgd(0.1), loss_fn, mesh=mesh, batch_norm="local")
        state, metrics = ddp.step(ddp.init(0, batch), batch)
        ends.append(jax.device_get((state.params, metrics)))
    close(*ends, rtol=1e-4, atol=1e-6)


def test_a_layer_of_all_rows_is_synchronized():
    report = jddp.verify(linen_net(None), optax.sgd(0.1), loss_fn, make_batch(16), mesh=4)
    assert report.passed, report
