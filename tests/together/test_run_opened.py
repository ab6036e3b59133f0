"""A run that has ended is opened, evaluated and predicted with, on any number of devices."""

import numpy as np
import optax
import pytest
from flax import nnx
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch

import jddp
from jddp.errors import ConfigError, FileSystemError, UsageError
from jddp.trainer.callbacks import KeepBest

OTHER = [make_batch(13, seed=9)]  # two rows more than eight devices have


@pytest.fixture(scope="module", params=["linen", "nnx"])
def of_objects(request, tmp_path_factory):
    """A run of `DataParallel.fit` whose replicas have their own statistics, and its model."""
    model = ConvNet() if request.param == "linen" else NnxConvNet(nnx.Rngs(0))
    options = {"batch_norm": "local", "ema_decay": 0.5, "mesh": 2}
    ddp = jddp.DataParallel(model, optax.sgd(0.1), loss_fn, **options)
    batches = [make_batch(8, seed=seed) for seed in range(4)]
    plan = {"num_steps": 4, "evaluate": OTHER, "eval_every_steps": 2, "eval_params": "ema"}
    plan |= {"run_dir": tmp_path_factory.mktemp("objects") / "run", "save_every_steps": 2}
    config = {"note": "mine"} if request.param == "linen" else None
    run = ddp.fit(batches, **plan, callbacks=[KeepBest("loss", mode="min")], config=config)
    return run, model


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_an_opened_run_is_the_run_that_was_trained(of_objects, num_devices):
    run, model = of_objects
    opened = jddp.Run.open(run.run_dir, model=model, loss_fn=loss_fn, mesh=num_devices)
    assert opened.evaluate(OTHER) == pytest.approx(run.evaluate())
    np.testing.assert_allclose(opened.predict(OTHER), run.predict(), rtol=1e-5, atol=1e-6)
    for name in ("step", "history", "evaluations", "config", "checkpoints", "stopped"):
        assert getattr(opened, name) == getattr(run, name), name
    assert opened.eval_metrics == run.eval_metrics
    assert len(opened.plot().axes) == 2
    loaded, x = jddp.load(run.run_dir, model=model), make_batch(8)["x"]
    for found in (run.model, opened.model):
        options = {"train": False} if isinstance(model, ConvNet) else {}
        np.testing.assert_allclose(found(x, **options), loaded(x, **options), rtol=1e-6)


def test_any_checkpoint_is_opened_with_either_parameters(of_objects):
    run, model = of_objects

    def losses(**chosen):
        opened = jddp.Run.open(run.run_dir, model=model, loss_fn=loss_fn, **chosen)
        return opened.step, opened.evaluate(OTHER)["loss"]

    best = min(run.evaluations, key=lambda record: record["loss"])
    assert losses(checkpoint=2) == pytest.approx((2, run.evaluations[0]["loss"]))
    assert losses(checkpoint="best") == pytest.approx((best["step"], best["loss"]))
    assert losses(checkpoint=run.checkpoints[0]) == losses(checkpoint="best")
    plain = run._ddp.evaluate(run.state, OTHER, "params")["loss"]
    assert losses(params="params") == pytest.approx((4, plain))
    message = r"checkpoints holds no step 3. Choose one of \[2, 4\]"
    with pytest.raises(FileSystemError, match=message):
        losses(checkpoint=3)
    with pytest.raises(ConfigError, match="params 'mean' is unknown"):
        losses(params="mean")


def test_what_a_run_of_objects_does_not_keep_is_asked_for(of_objects):
    run, model = of_objects
    with pytest.raises(ConfigError if run.config else UsageError, match="'note'|Give model="):
        jddp.Run.open(run.run_dir)
    opened = jddp.Run.open(run.run_dir, model=model)
    with pytest.raises(UsageError, match="keeps no loss. Give loss_fn="):
        opened.evaluate(OTHER)
    with pytest.raises(UsageError, match="has no evaluation batches"):
        opened.evaluate()
    with pytest.raises(UsageError, match="is only read"):
        opened.save()
    with pytest.raises(UsageError, match="is no run directory"):
        jddp.Run.open(run.run_dir / "logs")


def test_another_model_and_other_rows_are_refused_in_one_line(of_objects):
    run, model = of_objects
    with pytest.raises(ConfigError, match="do not fit") as caught:
        jddp.Run.open(run.run_dir, model=MLP(), loss_fn=loss_fn).evaluate(OTHER)
    assert "\n" not in str(caught.value)
    if isinstance(model, ConvNet):
        with pytest.raises(ConfigError, match="is not of the model NnxConvNet. .* at 10 places"):
            jddp.Run.open(run.run_dir, model=NnxConvNet(nnx.Rngs(0)))
    opened = jddp.Run.open(run.run_dir, model=model)
    with pytest.raises(ConfigError, match="Give rows of the shape and dtype"):
        opened.predict([{"x": np.ones((8, 5), np.float32)}])
    with pytest.raises(ConfigError, match="holds y, of which none"):
        opened.predict([{"y": OTHER[0]["y"]}])
