"""The examples run, and the page that explains jddp does what jddp does."""

import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from runs import ROOT
from states import close
from sweeps import swept

import jddp
from jddp.inspection.hlo import collectives, read_program
from jddp.reduce.plan import plan_buckets

EXAMPLES = ROOT / "examples"
# Those of which a test below looks at what they do, in fewer steps.
LONG = {"bring_your_own_step", "fine_tune", "gan", "perturbed_weights", "reinforce", "roll_back"}
LONG |= {"send_signs", "teacher_student", "two_stages"}
SCRIPTS = sorted(EXAMPLES.glob("*.py"))  # of notebooks/ see test_notebook.py


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize(
    "example",
    [pytest.param(x, marks=[pytest.mark.long] * (x.stem in LONG), id=x.name) for x in SCRIPTS],
)
def test_an_example_runs(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for the script it runs
    runpy.run_path(str(example), run_name="__main__")
    assert "loss" in capsys.readouterr().out


@pytest.mark.slow
def test_frozen_parameters_are_not_sent_and_later_released(capsys):
    rows = load("fine_tune")["main"](num_steps=2)
    head, adapters, all_of_them = 256 * 10 + 10, 4 * (784 + 3 * 256), 1_077_288 // 4
    sent = {name: num_bytes // 4 for name, (_, num_bytes, _) in rows.items()}
    assert sent["then released"] == sent["all from the start"] == all_of_them
    assert (sent["frozen"], sent["LoRA"]) == (head, head + adapters)
    for _, num_bytes, of_optimizer in rows.values():  # two moments, and counts of steps
        assert 0 < of_optimizer - 2 * num_bytes < 100
    assert "LoRA" in capsys.readouterr().out


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


@pytest.mark.parametrize("layout, bucket_bytes", [("leaf", 2**20), ("flat", 100)])
def test_the_page_does_what_the_library_does(layout, bucket_bytes):
    one_page = load("ddp_in_one_page")
    assert len((EXAMPLES / "ddp_in_one_page.py").read_text().splitlines()) <= 120
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    model, optimizer = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(2)]), optax.adam(1e-2)
    rows = np.random.default_rng(0).standard_normal((24, 6), dtype=np.float32)
    batch = {"x": rows[:, :4], "y": rows[:, 4:], "mask": np.float32(np.arange(24) < 19)}
    reduction = jddp.Reduction(bucket_mb=bucket_bytes / 2**20, layout=layout)
    ddp = jddp.DataParallel(model, optimizer, squared_error, mesh=mesh, reduction=reduction)
    state = ddp.init(seed=0, batch=batch)
    params = ddp.model(state)["params"]
    # The page goes by the order of the tree, which is what jddp falls back on.
    plan = [[*x.leaves] for x in plan_buckets(params, bucket_bytes=bucket_bytes).buckets]
    assert one_page["plan_buckets"](params, bucket_bytes) == plan

    def loss_fn(params, batch):
        return squared_error(lambda x: model.apply({"params": params}, x), batch)

    step = one_page["make_step"](loss_fn, optimizer, mesh, bucket_bytes=bucket_bytes, layout=layout)
    replicated = jax.NamedSharding(mesh, jax.P())
    params, opt_state = jax.device_put((params, optimizer.init(params)), replicated)
    for _ in range(3):
        state, metrics = ddp.step(state, batch)
        params, opt_state, loss = step(params, opt_state, batch)
        np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)
    # The same sums in the same order; the compiler may fuse them differently.
    close(params, ddp.model(state)["params"], rtol=1e-5, atol=1e-6)


def test_a_run_goes_back_and_learns_on_behind_a_bad_batch(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    main = load("roll_back")["main"]
    good, jumps = main(num_steps=41, bad=())
    assert jumps == []
    run, jumps = main(num_steps=41, bad=(30,))
    assert jumps[0] in (30, 31)  # the step behind it was under way
    assert int(run.state.step) == 41
    assert run.metrics["loss"] < 1.5 * good.metrics["loss"]


def rows_of_images(num=16):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((num, 28, 28, 1), dtype=np.float32)
    return {"image": images, "label": rng.integers(0, 10, num, np.int32)}


@pytest.mark.parametrize("num_heads", swept([2, 1], every=2))
def test_stages_send_boundaries_and_have_the_loss_and_gradients_of_the_whole_model(num_heads):
    two_stages, batch = load("two_stages"), rows_of_images()
    stages, rows = two_stages["make_stages"](num_heads)
    gradients = two_stages["make_gradients"](stages, rows.sharding.mesh)
    gradients = gradients.lower(rows, batch).compile()

    def whole(rows):
        boundary = stages[0](rows[0], batch["image"])
        of_heads = [head(row, boundary) for head, row in zip(stages[1:], rows[1:], strict=True)]
        return jnp.stack([two_stages["cross_entropy"](x, batch["label"]) for x in of_heads]).mean()

    want_loss, want = jax.value_and_grad(whole)(jax.device_get(rows))
    loss, got = gradients(rows, batch)
    # Means of four micro-batches instead of one mean: sums in another order.
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert [len(x.data) for x in got.addressable_shards] == [1] * len(stages)
    assert all(np.abs(x).max() > 0.01 for x in np.asarray(got))
    found = collectives(read_program(gradients.as_text()))
    sends = [(x.pairs, x.bytes * x.num_runs) for x in found if x.op == "collective-permute"]
    batch_height_width_channels_bytes = 16 * 7 * 7 * 16 * 4
    pairs = [pair for head in range(1, len(stages)) for pair in ((0, head), (head, 0))]
    assert sorted(sends) == sorted(((x,), batch_height_width_channels_bytes) for x in pairs)
    assert [x.bytes for x in found if x.op != "collective-permute"] == [4]  # of the loss
