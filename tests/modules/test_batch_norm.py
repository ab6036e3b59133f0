"""Batch norm over N replicas equals batch norm over the whole batch on one device, by any axis."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from jax import lax
from judge import assert_same_on_all_devices
from states import close, equal
from sweeps import swept
from tiny import ConvNet, Of, make_batch, take_steps

import jddp
from jddp.ground.errors import UsageError


class Norm(nn.Module):
    axis_name: str | None = None
    use_fast_variance: bool = True
    use_mask: bool = False
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, mask, train):
        options = {"axis_name": self.axis_name, "use_fast_variance": self.use_fast_variance}
        norm = nn.BatchNorm(not train, momentum=0.5, dtype=self.dtype, **options)
        return norm(x, mask=mask[:, None] if self.use_mask else None)


class NnxNorm(nnx.Module):
    def __init__(self, use_mask=False, **options):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0), **options)
        self.use_mask = use_mask

    def __call__(self, x, mask, train=None):
        return self.norm(x, mask=mask[:, None] if self.use_mask else None)


def squares(model, batch, train):
    y = model(batch["x"], batch.get("mask"), train=train)
    return (y.astype(jnp.float32) * batch["scale"]) ** 2


def rows(num_valid=16):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(3, 2, (16, 3)).astype(np.float32),
        "scale": rng.normal(size=(16, 3)).astype(np.float32),
        "mask": np.arange(16) < num_valid,
    }


def wrapped(model, **options):
    """By plain SGD at rate 1: parameters move by their gradients."""
    return jddp.DataParallel(model, optax.sgd(1.0), squares, **options)


def statistics(state):
    kept = state.model_state.get("batch_stats") or state.model_state["rest"]
    return jax.tree.leaves(jax.device_get(kept))


def one_device(layer, batch):
    """Flax's own layer over a batch: loss, gradients and statistics."""
    options = {"use_running_average": False}
    variables = layer.init(jax.random.key(0), batch["x"], **options)

    def loss(params):
        given = {**variables, "params": params}
        y, written = layer.apply(given, batch["x"], mutable=["batch_stats"], **options)
        return ((y * batch["scale"]) ** 2).mean(), written["batch_stats"]

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


in_both = pytest.mark.parametrize("kind", [Norm, NnxNorm])


@in_both
@pytest.mark.parametrize("fast", swept([True, False], every=2))
def test_replicas_weigh_by_what_their_masks_hold_empty_ones_included(kind, fast):
    """The judge is Flax's own layer over the valid rows alone, on one device."""
    ddp = wrapped(kind(use_fast_variance=fast, use_mask=True))
    layer = nn.BatchNorm(momentum=0.5, use_fast_variance=fast)
    for num_valid in (16, 11, 3):
        batch = rows(num_valid)
        valid = jax.tree.map(lambda x, num=num_valid: x[:num], batch)
        (value, written), grads = one_device(layer, valid)
        state = ddp.init(0, batch)
        before = jax.device_get(state.params)
        state, metrics = ddp.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        moved = jax.tree.map(np.subtract, before, jax.device_get(state.params))
        # Sums of at most 16 rows in another order.
        close(jax.tree.leaves(moved), jax.tree.leaves(grads), rtol=1e-4)
        close(statistics(state), jax.tree.leaves(written), atol=0)


@in_both
def test_local_keeps_each_replica_s_own_and_averages_them_when_they_are_read(kind):
    batch = rows()
    ddp = wrapped(kind(), batch_norm="local")
    state, _ = take_steps(ddp, [batch] * 2)
    own = batch["x"].reshape(8, 2, 3).mean(1)
    np.testing.assert_allclose(statistics(state)[0], 0.75 * own, rtol=1e-5)
    model = ddp.model(state)
    read = model.norm.mean if kind is NnxNorm else model["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(read, 0.75 * batch["x"].mean(0), rtol=1e-5)
    assert ddp.evaluate(state, [batch])["examples"] == 16


@in_both
@pytest.mark.parametrize("num_valid, dtype", [(16, jnp.bfloat16), (5, None)])
def test_an_unbiased_running_variance_divides_by_one_less(kind, num_valid, dtype):
    """Statistics are exact in a layer of low precision too."""
    batch, states = rows(num_valid), []
    for unbiased in (False, True):
        ddp = wrapped(
            kind(use_mask=True, dtype=dtype), batch_norm=jddp.SyncBatchNorm(unbiased=unbiased)
        )
        states.append(ddp.step(ddp.init(0, batch), batch)[0])
    x = batch["x"][:num_valid]
    for ddof, state in enumerate(states):
        want = [0.5 * x.mean(0), 0.5 + 0.5 * x.var(0, ddof=ddof)]
        close(statistics(state), want, atol=0)
    equal(*(x.params for x in states))


def moments_over(axis_name, x):
    mean, square = x.mean(0), jnp.square(x).mean(0)
    if axis_name is not None:
        mean, square = jax.lax.pmean((mean, square), axis_name)
    return mean, square - jnp.square(mean)


class ForeignNorm(nn.Module):
    """A batch norm with no field for an axis, as some model libraries have them."""

    axis = None

    @nn.compact
    def __call__(self, x, use_running_average):
        mean_kept = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1])
        var_kept = self.variable("batch_stats", "var", jnp.ones, x.shape[-1])
        mean, var = mean_kept.value, var_kept.value
        if not use_running_average:
            mean, var = moments_over(None if self.is_initializing() else self.axis, x)
            if not self.is_initializing():
                mean_kept.value, var_kept.value = mean, var
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return scale[None] * (x - mean[None]) / jnp.sqrt(var[None] + 1e-5)


class RegisteredNorm(ForeignNorm):
    pass


class DeafNorm(ForeignNorm):
    """Has the field, and does not ask it."""

    axis_name: str | None = None


class CopiedNorm(DeafNorm):
    """A batch norm as model libraries carry them: another class, with the same two names."""

    axis = property(lambda self: self.axis_name)


class NnxForeignNorm(nnx.Module):
    def __init__(self):
        self.mean, self.var = nnx.BatchStat(jnp.zeros(3)), nnx.BatchStat(jnp.ones(3))
        self.scale = nnx.Param(jnp.ones(3))

    def __call__(self, x, use_running_average):
        mean, var = self.mean[...], self.var[...]
        if not use_running_average:
            mean, var = moments_over(getattr(self, "axis_name", None), x)
            self.mean[...], self.var[...] = mean, var
        return self.scale[None] * (x - mean[None]) / jnp.sqrt(var[None] + 1e-5)


class NnxRegisteredNorm(NnxForeignNorm):
    pass


class NnxCopiedNorm(NnxForeignNorm):
    def __init__(self, axis_name=None):
        super().__init__()
        self.axis_name = axis_name


class Foreign(nn.Module):
    kind: Callable = ForeignNorm

    @nn.compact
    def __call__(self, x, mask, train):
        return self.kind()(nn.Dense(3)(x), use_running_average=not train)


class NnxForeign(nnx.Module):
    def __init__(self, kind=NnxForeignNorm):
        self.dense, self.norm = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), kind()

    def __call__(self, x, mask, train):
        return self.norm(self.dense(x), use_running_average=not train)


@pytest.mark.parametrize("model", swept([Foreign(), Foreign(DeafNorm), NnxForeign()], every=3))
def test_a_batch_norm_that_knows_no_axis_is_refused_under_sync_on_several_replicas(model):
    message = "batch_norm='sync': .*mean.* jddp.register_batch_norm.*'local'.*verify"
    with pytest.raises(jddp.ConfigError, match=message) as caught:
        take_steps(wrapped(model), [rows()])
    assert "\n" not in str(caught.value)
    for options in ({"mesh": 1}, {"batch_norm": "local"}, {"batch_norm": "broadcast"}):
        assert np.isfinite(take_steps(wrapped(model, **options), [rows()])[1]["loss"])


OF_LIBRARIES = [Foreign(CopiedNorm), NnxForeign(NnxCopiedNorm), Foreign(RegisteredNorm)]
OF_LIBRARIES += [NnxForeign(NnxRegisteredNorm)]


@pytest.mark.parametrize("overlap", swept([False, True], every=2))
@pytest.mark.parametrize("model", OF_LIBRARIES)
def test_a_library_s_batch_norm_with_its_two_names_or_registered_equals_one_device(model, overlap):
    jddp.register_batch_norm(RegisteredNorm)
    assert jddp.register_batch_norm(NnxRegisteredNorm) is NnxRegisteredNorm
    # Each replica has the same row twice, so that both micro-batches are the whole batch.
    batch, ends = jax.tree.map(lambda x: np.repeat(x[:8], 2, axis=0), rows()), []
    for options in ({"mesh": 1}, {}, {"accumulate_steps": 2}):
        options |= {"reduction": jddp.Reduction(overlap=overlap)}
        ddp = jddp.DataParallel(model, optax.sgd(0.5), squares, **options)
        state, metrics = take_steps(ddp, [batch] * 2)
        ends.append(jax.device_get((state.params, statistics(state), metrics["loss"])))
        assert ddp.evaluate(state, [batch])["examples"] == 16
    # Two steps of sums of 16 rows in another order; the loss feels 1 / sqrt(var).
    for other in ends[1:]:
        close(ends[0], other, rtol=1e-4, atol=1e-5)
    assert jddp.verify(model, optax.sgd(0.5), squares, rows()).passed


@pytest.mark.parametrize(
    "model, size",
    swept([(Norm(), 1), (Norm(), 2), (NnxNorm(), 2), (Foreign(RegisteredNorm), 2)], every=2),
)
def test_a_group_of_replicas_is_a_device_of_its_own(model, size):
    """The judge is one device that takes the rows of each group apart."""
    jddp.register_batch_norm(RegisteredNorm)

    def step(indices, **options):
        ddp, batch = wrapped(model, **options), jax.tree.map(lambda x: x[indices], rows())
        state, metrics = ddp.step(ddp.init(0, rows()), batch)
        return state, jax.device_get((state.params, statistics(state), metrics["loss"]))

    state, got = step(np.arange(16), mesh=4, batch_norm=jddp.SyncBatchNorm(group_size=size))
    each = [step(group, mesh=1)[1] for group in np.split(np.arange(16), 4 // size)]
    # Sums of at most 16 rows in another order.
    close(got, jax.tree.map(lambda *leaves: np.mean(leaves, 0), *each), rtol=1e-4)
    assert_same_on_all_devices(state)


def test_groups_and_classes_that_there_cannot_be_are_refused():
    with pytest.raises(jddp.ConfigError, match=r"=3 does not divide 4 .*\[1, 2, 4\]"):
        wrapped(Norm(), batch_norm=jddp.SyncBatchNorm(group_size=3), mesh=4)
    for model in (Foreign(CopiedNorm), NnxForeign(NnxCopiedNorm)):
        grouped = wrapped(model, batch_norm=jddp.SyncBatchNorm(group_size=2))
        with pytest.raises(jddp.ConfigError, match="knows no groups of replicas"):
            grouped.init(0, rows())
    for wrong in (squares, int, ForeignNorm()):
        with pytest.raises(jddp.ConfigError, match="is no class of Flax modules"):
            jddp.register_batch_norm(wrong)
    with pytest.raises(jddp.ConfigError, match="model is function"):
        jddp.sync_batch_norm(squares)


@pytest.mark.parametrize(
    "model", swept([Norm(), NnxNorm(), Foreign(CopiedNorm), NnxForeign(NnxCopiedNorm)], every=3)
)
def test_a_model_is_converted_for_a_step_of_one_s_own(model):
    """On eight replicas of a custom `shard_map` it is what it is on one device."""
    converted, given = jddp.sync_batch_norm(model, "batch"), (rows()["x"], rows()["mask"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))

    def run(model, *given):
        if isinstance(model, nn.Module):
            return model.apply(variables, *given, True, mutable=["batch_stats"])
        graph, values = nnx.split(model)
        model = nnx.merge(graph, jax.tree.map(jnp.copy, values))
        return model(*given, train=True), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    if isinstance(model, nn.Module):
        variables = model.init(jax.random.key(0), *given, True)
    specs = {"in_specs": (jax.P("batch"),) * 2, "out_specs": (jax.P("batch"), jax.P())}
    mapped = jax.shard_map(functools.partial(run, converted), mesh=mesh, check_vma=False, **specs)
    close(mapped(*given), run(model, *given), rtol=1e-4, atol=1e-5)
    assert type(converted).__name__ == type(model).__name__


BROADCAST = {  # The number of replicas, the first valid row, and the rows whose statistics count.
    "of the first replica": (4, 0, [slice(0, 4)]),
    "of the first with valid rows": (4, 9, [slice(9, 12)]),
    "in both micro-batches": (4, 9, [slice(9, 10), slice(10, 12)]),
    "of another in each micro-batch": (2, 4, [slice(8, 12), slice(4, 8)]),
}


@in_both
@pytest.mark.parametrize("mesh, begin, own", BROADCAST.values(), ids=BROADCAST)
def test_broadcast_sends_statistics_of_the_first_replica_with_a_valid_row(kind, mesh, begin, own):
    """Of an empty batch Flax's layer makes NaN, which would stay in them for good."""
    options = {"batch_norm": "broadcast", "mesh": mesh, "accumulate_steps": len(own)}
    ddp, batch = wrapped(kind(use_mask=True), **options), rows()
    batch["mask"] = np.arange(16) >= begin
    state = ddp.init(0, batch)
    mean, var = statistics(state)
    state, metrics = ddp.step(state, batch)
    assert np.isfinite(metrics["loss"])
    for part in own:
        x = batch["x"][part]
        mean, var = (mean + x.mean(0)) / 2, (var + x.var(0)) / 2
    close(statistics(state), [mean, var], rtol=1e-4, atol=0)
    assert_same_on_all_devices(state)


@in_both
@pytest.mark.parametrize("mode", ["sync", "broadcast", "local", jddp.SyncBatchNorm(group_size=1)])
def test_a_batch_or_a_group_without_a_valid_row_leaves_the_statistics_as_they_were(kind, mode):
    ddp = wrapped(kind(use_mask=True), batch_norm=mode, mesh=2)
    state, _ = ddp.step(ddp.init(0, rows()), rows())
    before = statistics(state)
    state, _ = ddp.step(state, rows(num_valid=0))
    equal(statistics(state), before)
    if isinstance(mode, jddp.SyncBatchNorm):
        state, x = ddp.step(state, rows(num_valid=8))[0], rows()["x"][:8]
        # The mean of both groups: one moves halfway, as its momentum says, the other stays.
        want = [0.75 * a + 0.25 * b for a, b in zip(before, (x.mean(0), x.var(0)), strict=True)]
        close(statistics(state), want, rtol=1e-4, atol=0)


@in_both
@pytest.mark.parametrize("overlap, parts", [(False, 4), (True, 2)])
def test_running_statistics_move_once_a_step_however_many_micro_batches(kind, overlap, parts):
    """The judge moves them once, towards the mean of the micro-batches' own."""
    ddp = wrapped(kind(), mesh=2, accumulate_steps=parts, reduction=jddp.Reduction(overlap=overlap))
    batch = {name: x for name, x in rows(16).items() if name != "mask"}
    state = ddp.init(0, batch)
    old = statistics(state)
    state, _ = ddp.step(state, batch)
    # Replicas have halves of the rows, and micro-batches parts of both.
    own = np.arange(16).reshape(2, parts, -1).swapaxes(0, 1).reshape(parts, -1)
    means = (np.mean([f(batch["x"][i], axis=0) for i in own], axis=0) for f in (np.mean, np.var))
    want = [0.5 * x + 0.5 * y for x, y in zip(old, means, strict=True)]
    close(statistics(state), want, rtol=1e-4, atol=0)
    assert_same_on_all_devices(state)


def test_statistics_that_no_micro_batch_moves_stay_as_they_are():
    frozen = Of(lambda m, x, train: nn.Dense(4)(nn.BatchNorm(use_running_average=True)(x)))
    ddp, batch = tiny.wrapped(frozen, accumulate_steps=3), make_batch(12)
    state = ddp.init(0, batch)
    mean = np.random.default_rng(0).normal(size=16).astype(np.float32)
    kept = {**state.model_state, "batch_stats": {"BatchNorm_0": {"mean": mean, "var": mean**2}}}
    state = ddp.init(0, batch, params={"params": jax.device_get(state.params), **kept})
    state, _ = ddp.step(state, batch)
    equal(jax.device_get(state.model_state), kept)


@pytest.mark.parametrize("batch_norm", swept(["sync", "local"], every=2))
def test_parameters_without_the_statistics_of_their_layers_are_refused(batch_norm):
    ddp, batch = tiny.wrapped(ConvNet(), batch_norm=batch_norm), make_batch()
    variables = ConvNet().init(jax.random.key(0), batch["x"], train=False)
    bare = ddp.init(params=variables["params"])
    with pytest.raises(UsageError, match=r"'batch_stats'.*params=variables"):
        ddp.step(bare, batch)
    for given in ({"params": variables}, {"params": variables["params"], "batch": batch}):
        state, _ = ddp.step(ddp.init(**given), batch)
        assert ddp.evaluate(state, [batch])["examples"] == 16


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
