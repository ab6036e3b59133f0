"""Models and losses that name the axis of the replicas, as those written for `pmap` do."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from states import equal
from sweeps import swept
from test_batch_norm import (
    CopiedNorm,
    Foreign,
    NnxCopiedNorm,
    NnxForeign,
    NnxNorm,
    Norm,
    rows,
    squares,
    statistics,
)
from tiny import Of, take_steps

import jddp

KINDS = {
    "linen": lambda axis: Norm(axis_name=axis),
    "nnx": lambda axis: NnxNorm(axis_name=axis),
    "linen copy": lambda axis: Foreign(functools.partial(CopiedNorm, axis_name=axis)),
    "nnx copy": lambda axis: NnxForeign(functools.partial(NnxCopiedNorm, axis)),
}
MODES = [*((kind, "sync", {}) for kind in KINDS), ("linen copy", "local", {})]
MODES += [("nnx copy", "broadcast", {})]
# The mode decides where the axis of the replicas has the name too.
MODES += [("linen", mode, {"mesh": "batch"}) for mode in ("sync", "local")]
MODES += [(kind, "local", {"strategy": jddp.LogicalReplicas(4)}) for kind in ("linen", "nnx copy")]


def trained(model, **options):
    axis = options.pop("mesh", "data")
    options["mesh"] = axis if isinstance(axis, int) else on_axis(axis)
    ddp, batch = jddp.DataParallel(model, optax.sgd(0.1), squares, **options), rows()
    state, metrics = take_steps(ddp, [batch] * 2)
    return jax.device_get((state.params, statistics(state), metrics))


@pytest.mark.parametrize("kind, mode, options", swept(MODES, every=3))
def test_a_batch_norm_that_names_an_axis_is_that_which_names_none(kind, mode, options):
    got = trained(KINDS[kind]("batch"), batch_norm=mode, **options)
    equal(got, trained(KINDS[kind](None), batch_norm=mode, **{**options, "mesh": 2}))


def lanes(m, x, mask, train):
    axes = {"in_axes": 1, "out_axes": 1, "axis_name": "lane", "split_rngs": {"params": False}}
    norm = nn.vmap(nn.BatchNorm, variable_axes={"params": None, "batch_stats": None}, **axes)
    return norm(use_running_average=not train, axis=(), axis_name="lane")(x)


def test_an_axis_inside_the_model_is_left_to_it():
    def alone(m, x, mask, train):
        return nn.BatchNorm(not train)(x.reshape(-1, 1)).reshape(x.shape)

    models = Of(lanes), Of(alone)
    got, want = (trained(x, batch_norm="local", mesh=1)[-1]["loss"] for x in models)
    # One mean over 48 numbers, or the mean of three over 16 each.
    np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(jddp.ConfigError, match="'lane', which is mapped inside the model"):
        trained(models[0])


def centred(axis, dropout):
    def body(m, x, train):
        x = nn.Dropout(dropout, deterministic=not train)(nn.Dense(4)(x))
        return nn.Dense(1)(x - lax.pmean(x.mean(0), axis)[None])[:, 0]

    return Of(body)


def by_name(axis):
    def loss(model, batch, train):
        y = model(batch["x"], train)
        every = jddp.all_gather(y)  # which follows the step that it is in
        spread = lax.pmean((y**2).mean(), axis)
        return (y - batch["scale"][:, 0]) ** 2, {"spread": spread, "top": every.max()}

    return loss


def named(axis, dropout=0.0, *, make=jddp.DataParallel, **options):
    return make(centred(axis, dropout), optax.adam(0.1), by_name(axis), **{"mesh": 2, **options})


def on_axis(axis):
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), (axis,))


@pytest.mark.parametrize("dropout", swept([0.0, 0.3], every=2))
def test_verify_takes_the_axis_over(dropout):
    batch = {name: x for name, x in rows().items() if name != "mask"}
    report = named("batch", dropout, make=jddp.verify, batch=batch, mesh=on_axis("batch"))
    assert report.passed, report
    assert report.is_side_by_side == bool(dropout)


def test_a_run_along_another_axis_resumes_and_is_explained(tmp_path):
    ddp = named("batch", mesh=on_axis("batch"), strategy="zero1")
    for num in (2, 4):
        run = jddp.fit(ddp, [rows()] * num, num_steps=num, run_dir=tmp_path, save_every_steps=2)
    equal(run.state.params, take_steps(ddp, [rows()] * 4)[0].params)
    assert "all-gather" in str(jddp.explain(ddp, rows()))
