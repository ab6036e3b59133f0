"""What a notebook has in its hands: a run's results, the newest state, and what each looks like."""

import _thread
import itertools
import os
import re
import signal
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from fsspec.implementations.memory import MemoryFileSystem
from runs import records
from states import assert_same, close, equal
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch, make_batches, wrapped

import jddp
from jddp.commands.checkpoint import main as checkpoint_command
from jddp.data import TrainBatches
from jddp.ground.errors import ConfigError, FileSystemError, UsageError


def fit(num_steps=4, **options):
    batches = make_batches(8, rows=16)
    options = {"evaluate": [make_batch(13, seed=9)], "log_every_steps": 1, **options}
    return jddp.fit(wrapped(mesh=8), batches, num_steps=num_steps, eval_every_steps=2, **options)


# A run directory may be a URL: a run resumes from it on a machine that has nothing of it.
NUMBERS, SAVED = itertools.count(), {"save_every_steps": 2}


def logits_of(model, batch, train):
    return {"logits": model(batch["x"], train=train), "label": batch["y"]}


def test_a_run_evaluates_and_predicts_with_its_own_batches_or_with_others():
    run, other = fit(), make_batch(16, seed=5)
    assert run.evaluate()["loss"] == run.eval_metrics["loss"]
    assert run.evaluate([other])["examples"] == 16
    assert run.predict([{"x": other["x"]}]).shape == (16, 4)
    assert run.predict().shape == (13, 4)
    with pytest.raises(UsageError, match="has no evaluation batches"):
        fit(evaluate=None).evaluate()


def test_a_run_stays_usable_when_another_starts_from_its_state():
    first = fit(2)
    before = first.evaluate()
    batches = [make_batch(seed=seed) for seed in range(2, 4)]
    second = jddp.fit(wrapped(mesh=8), batches, num_steps=4, state=first.state)
    assert first.evaluate() == before
    assert len(first.predict(function=logits_of)["label"]) == 13
    assert_same(second.state, fit(4).state)


def test_a_run_remembers_its_records_and_draws_a_panel_for_the_loss_and_for_each_metric():
    run = fit()
    steps = [f"{record['step']} {record['split']}" for record in run.history]
    assert steps == ["1 train", "2 train", "2 eval", "3 train", "4 train", "4 eval"]
    assert run.history[-2:] == [run.metrics, run.eval_metrics]
    figure = run.plot()
    assert [panel.get_title() for panel in figure.axes] == ["loss", "accuracy"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    lines = {line.get_label(): line.get_xdata().tolist() for line in figure.axes[0].lines}
    assert lines == {"train": [1, 2, 3, 4], "eval": [2, 4]}
    ddp = wrapped()
    with pytest.raises(UsageError, match="no record yet"):
        jddp.Run(ddp, ddp.init(0, make_batch())).plot()


@pytest.mark.parametrize("model", [ConvNet(), NnxConvNet(nnx.Rngs(0))], ids=["linen", "nnx"])
def test_predictions_are_those_of_one_device_row_by_row(model):
    ddp = wrapped(model, mesh=8)
    state = ddp.init(0, make_batch())
    batches = [make_batch(size, seed=i) for i, size in enumerate((0, 16, 16, 5))]
    got = ddp.predict(state, batches, logits_of)
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    read = ddp.model(state)
    module = model.bind(read) if isinstance(model, nn.Module) else read
    want = logits_of(module, rows, False)
    np.testing.assert_array_equal(got["label"], rows["y"])
    # Convolutions of other numbers of rows.
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=1e-5, atol=1e-6)


def test_predictions_without_a_row_for_each_or_a_known_input_are_refused():
    ddp = wrapped()
    state = ddp.init(0, make_batch())
    with pytest.raises(ConfigError, match=r"shape \(\) for 8 rows"):
        ddp.predict(state, [make_batch()], lambda model, batch: model(batch["x"], False).sum())
    with pytest.raises(ConfigError, match=r"holds y, of which none .* function\(model, batch\)"):
        ddp.predict(state, [{"y": make_batch()["y"]}])


@pytest.fixture
def interrupts():
    """Ctrl-C as a terminal has it: a shell that starts jobs in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_step_is_sent_comes_when_its_state_is_kept(monkeypatch):
    ddp, batch = wrapped(), make_batch()
    state = ddp.init(0, batch)
    state, _ = ddp.step(state, batch)
    call = ddp.steps.step_for(state, batch)

    def taken_then_interrupted(state, inputs):
        result = call.run(state, inputs)
        assert state.step.is_deleted()
        signal.raise_signal(signal.SIGINT)
        return result

    sent = call._replace(run=taken_then_interrupted)
    monkeypatch.setattr(ddp.steps, "step_for", lambda *_, **__: sent)
    with pytest.raises(KeyboardInterrupt):
        ddp.step(state, batch)
    monkeypatch.undo()
    assert int(ddp.latest.step) == 2
    state, _ = ddp.step(ddp.latest, batch)
    assert int(state.step) == 3


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_step_is_traced_comes_at_once_and_costs_nothing():
    def loss(model, batch, train):
        if train and not model.is_initializing() and waiting:
            waiting.pop()
            _thread.interrupt_main()
        return loss_fn(model, batch, train)

    waiting = []
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss)
    assert ddp.latest is None
    state = ddp.init(0, make_batch())
    waiting.append("now")
    with pytest.raises(KeyboardInterrupt):
        ddp.step(state, make_batch(32))
    assert ddp.latest is state
    state, _ = ddp.step(ddp.latest, make_batch(32))
    assert ddp.latest is state
    assert int(state.step) == 1


def test_what_a_cell_ends_with_says_what_it_is_in_text_and_in_html():
    ddp, batch = wrapped(ConvNet(), mesh=8, ema_decay=0.9, accumulate_steps=2), make_batch()
    assert repr(ddp) == "DataParallel(ConvNet on 8 x cpu, 2 micro-batches a step)"
    state = ddp.init(0, batch)
    assert "ema_params   64 numbers in 5 arrays, 0.000244 MiB" in repr(state)
    assert repr(jax.eval_shape(lambda: state)).startswith("TrainState, its shapes")
    for shown in (ddp, state, fit(), ddp.plan, jddp.explain(ddp, batch)):
        assert shown._repr_html_().startswith("<")
    ddp.step(state, batch)
    assert "use ddp.latest" in repr(state)


def test_a_tilde_in_a_path_given_to_the_api_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given, ddp = make_batch(), wrapped(mesh=1)
    run = jddp.fit(ddp, [given], num_steps=1, run_dir="~/run")
    assert run.run_dir == tmp_path / "run"
    ddp.init(0, given, params="~/run")
    assert checkpoint_command(["verify", "~/run"]) == 0
    with pytest.raises(UsageError, match="^" + re.escape(f"{tmp_path}/run holds a run")):
        jddp.open_run("~/run")
    with pytest.raises(ConfigError, match="'~nobody-here/x' names a home directory that is not"):
        jddp.fit(ddp, [given], num_steps=1, run_dir="~nobody-here/x")
    assert {"run"} == {path.name for path in tmp_path.iterdir()}


class Leave(jddp.Callback):
    """Changes the working directory, as Hydra or a notebook may."""

    def __init__(self, folder):
        self.folder = folder

    def on_step(self, run, metrics):
        os.chdir(self.folder)


def test_a_run_stays_in_its_directory_where_the_program_leaves_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (other := tmp_path / "other").mkdir()
    given, ddp = make_batch(), wrapped(mesh=1)
    saving = {"log_every_steps": 1, "save_every_steps": 2, "run_dir": "run"}
    run = jddp.fit(ddp, [given] * 5, num_steps=5, callbacks=[Leave(other)], **saving)
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert run.checkpoints == [f"checkpoints/{step}" for step in (2, 4, 5)]
    os.chdir(tmp_path)
    found = jddp.open_run("run", model=MLP(), loss_fn=loss_fn, mesh=1)
    os.chdir(other)
    assert found.checkpoints == run.checkpoints
    assert list(other.iterdir()) == []


def test_a_second_run_of_a_process_does_not_train_into_the_directory_of_the_first(tmp_path):
    given, ddp = make_batch(), wrapped(mesh=1)
    refused = []

    class Again(jddp.Callback):
        def on_step(self, run, metrics):
            with pytest.raises(ConfigError, match="in use by another run of this process") as error:
                jddp.fit(wrapped(mesh=1), [given] * 9, num_steps=9, run_dir=tmp_path)
            refused.append(error)

    run = jddp.fit(
        ddp, [given] * 3, num_steps=3, run_dir=tmp_path, log_every_steps=1, callbacks=[Again()]
    )
    assert len(refused) == run.step == 3
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", Path("s3://bucket/run")])
def test_a_url_given_to_the_api_is_refused_before_a_folder_is_made(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    given, ddp = make_batch(), wrapped(mesh=1)
    said = r"is a URL, and only a run directory|pip install 'jddp\[s3\]'"
    for call in (
        lambda: jddp.fit(ddp, [given], num_steps=1, run_dir=url),
        lambda: ddp.init(0, given, params=url),
        lambda: jddp.train("gpt_stdlib", **{"run.dir": str(url)}),
        lambda: jddp.open_run(url).model,
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert checkpoint_command(["verify", str(url)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_arrays_are_trained_on_and_evaluated_as_batches_of_them_and_as_on_one_device():
    data, test = make_batch(20), make_batch(7, seed=1)
    given = {"batches": data, "global_batch_size": 12, "num_epochs": 2, "evaluate": test, "seed": 3}
    ddp, one = (wrapped(mesh=size) for size in (4, 1))
    run, on_one = jddp.fit(ddp, **given), jddp.fit(one, **given)
    batches = TrainBatches(data, global_batch_size=12, num_epochs=2, seed=3)
    want = jddp.fit(ddp, batches, num_steps=4, evaluate=[test], seed=3)  # the last batch is partial
    equal((run.state.params, run.eval_metrics), (want.state.params, want.eval_metrics))
    assert run.eval_metrics["examples"] == 7
    assert jddp.fit(ddp, **given, state=run.state).step == 8
    for num_steps in (None, 3):
        batches = TrainBatches(data, global_batch_size=12, num_epochs=2, seed=3)
        assert jddp.fit(ddp, batches, num_steps=num_steps).step == (num_steps or 4)
    # Sums of twelve rows in another order, in four steps.
    close(run.state.params, on_one.state.params)


OF_DATA = {"batches": {"x": np.ones((8, 1))}, "global_batch_size": 4}
STEPS = {"batches": [], "num_steps": 1}
MADE = TrainBatches(make_batch(8), global_batch_size=4, seed=0)
WRONG = [
    ({"batches": {}, "num_steps": 1}, "global_batch_size= is missing"),
    ({"batches": {}, "global_batch_size": 4}, "num_steps= is missing: .*num_epochs="),
    ({"batches": MADE, "global_batch_size": 4}, "global_batch_size=4 .* are batches already"),
    ({"batches": []}, r"num_steps= is missing: fit\(ddp, batches, num_steps="),
    ({**OF_DATA, "num_steps": 1, "num_epochs": 1}, "num_steps= and num_epochs= exclude"),
    ({"batches": [], "num_epochs": 1}, "num_epochs=1 counts passes"),
    *(({**OF_DATA, "num_epochs": x}, f"num_epochs {x!r}") for x in (0, -1, float("nan"))),
    *(({"batches": [], "num_steps": x}, f"num_steps is .*; got {x!r}") for x in (2.0, "2", 0)),
    (STEPS | {"keep": True}, "keep is a whole number; got True"),
    (STEPS | {"run_dir": ""}, "run_dir=''"),
    (STEPS | {"callbacks": [print]}, r"callbacks\[0\]"),
    (STEPS | {"callbacks": [jddp.Callback]}, r"callbacks\[0\] .* class"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=[message for _, message in WRONG])
def test_arguments_of_fit_that_cannot_be_are_refused_before_a_batch_is_read(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        jddp.fit(wrapped(mesh=1), **given)
    assert "\n" not in str(caught.value)


@pytest.fixture
def url():
    return f"memory:///run-{next(NUMBERS)}"


@pytest.mark.slow
def test_a_run_at_a_url_resumes_bitwise_identically(url, tmp_path, capsys):
    first = fit(4, run_dir=url, **SAVED)
    with pytest.raises(ConfigError, match=f"{url} holds a run at step 4"):
        fit(2, run_dir=url, resume="never")
    resumed, whole = fit(8, run_dir=url, **SAVED), fit(8, run_dir=tmp_path, **SAVED)
    assert resumed.run_dir != first.run_dir
    assert_same(resumed.state.params, whole.state.params)
    losses = [[x["loss"] for x in run.history] for run in (resumed, whole)]
    assert losses[0] == losses[1]
    equal(jddp.open_run(url, model=MLP()).model.variables["params"], whole.state.params)
    assert checkpoint_command(["verify", url]) == 0
    verified = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert verified == ["4", "6", "8"]


def test_a_checkpoint_that_cannot_be_uploaded_is_lost_alone(url, monkeypatch, caplog, capsys):
    put = MemoryFileSystem.put_file

    def refuse(self, path, target, **options):
        if "/checkpoints/4/" in target or "/checkpoints/8/" in target:
            raise TimeoutError("no answer")
        return put(self, path, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    fit(6, run_dir=url, **SAVED)
    assert f"step 4 cannot be saved: process 0: {url} cannot be written: no answer" in caplog.text
    with pytest.raises(FileSystemError, match="step 8 cannot be saved"):
        fit(8, run_dir=url, **SAVED)
    monkeypatch.undo()
    assert fit(8, run_dir=url, **SAVED).step == 8
    assert "resumed from step 6 of 8" in capsys.readouterr().out
