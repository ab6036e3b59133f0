"""What a notebook has in its hands: a run's results, the newest state, and what each looks like."""

import _thread
import itertools
import json
import os
import re
import signal
import stat
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from fsspec.implementations.memory import MemoryFileSystem
from runs import at, contents, files_up_to, records, refused
from states import assert_same, close, equal
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch, make_batches, wrapped

import jddp
from jddp.commands.runs import checkpoint_command
from jddp.data import TrainBatches
from jddp.ground.errors import ConfigError, FileSystemError, NumericsError, UsageError
from jddp.trainer.reports.files import MetricsFile


def fit(num_steps=4, **options):
    batches = make_batches(8, rows=16)
    options = {"evaluate": [make_batch(13, seed=9)], "log_every_steps": 1, **options}
    return jddp.fit(wrapped(mesh=8), batches, num_steps=num_steps, eval_every_steps=2, **options)


def logits_of(model, batch, train):
    return {"logits": model(batch["x"], train=train), "label": batch["y"]}


def test_a_run_stays_usable_when_another_starts_from_its_state():
    first = fit(2)
    before, batches = first.evaluate(), make_batches(4, rows=16)[2:]
    second = jddp.fit(wrapped(mesh=8), batches, num_steps=4, state=first.state)
    assert first.evaluate() == before
    assert len(first.predict(function=logits_of)["label"]) == 13
    assert_same(second.state, fit(4).state)


def test_a_run_evaluates_predicts_remembers_its_records_and_draws_a_panel_for_each_metric():
    run, other = fit(), make_batch(16, seed=5)
    assert run.evaluate()["loss"] == run.eval_metrics["loss"]
    assert run.evaluate([other])["examples"] == 16
    assert run.predict([{"x": other["x"]}]).shape == (16, 4)
    assert run.predict().shape == (13, 4)
    steps = [f"{record['step']} {record['split']}" for record in run.history]
    assert steps == ["1 train", "2 train", "2 eval", "3 train", "4 train", "4 eval"]
    assert run.history[-2:] == [run.metrics, run.eval_metrics]
    figure = run.plot()
    assert [panel.get_title() for panel in figure.axes] == ["loss", "accuracy"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    lines = {line.get_label(): line.get_xdata().tolist() for line in figure.axes[0].lines}
    assert lines == {"train": [1, 2, 3, 4], "eval": [2, 4]}
    ddp = wrapped()
    begun = jddp.Run(ddp, ddp.init(0, make_batch()))
    for call, message in ((begun.plot, "no record yet"), (begun.evaluate, "no evaluation batches")):
        with pytest.raises(UsageError, match=message):
            call()


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

    waiting, ddp = [], wrapped(loss=loss)
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


def test_a_tilde_in_a_path_given_to_the_api_is_the_home_directory(ddp, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = make_batch()
    assert jddp.fit(ddp, [given], num_steps=1, run_dir="~/run").run_dir == tmp_path / "run"
    ddp.init(0, given, params="~/run")
    assert checkpoint_command(["verify", "~/run"]) == 0
    with pytest.raises(UsageError, match="^" + re.escape(f"{tmp_path}/run holds a run")):
        jddp.open_run("~/run")
    with pytest.raises(ConfigError, match="'~nobody-here/x' names a home directory that is not"):
        jddp.fit(ddp, [given], num_steps=1, run_dir="~nobody-here/x")
    assert {"run"} == {path.name for path in tmp_path.iterdir()}


def test_a_run_stays_in_its_directory_where_the_program_leaves_its_own(ddp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (other := tmp_path / "other").mkdir()
    leave = at(1, lambda run: os.chdir(other))  # as Hydra or a notebook may
    run = fit_in("run", ddp, 5, callbacks=[leave], save_every_steps=2)
    assert trained(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert run.checkpoints == [f"checkpoints/{step}" for step in (2, 4, 5)]
    os.chdir(tmp_path)
    found = jddp.open_run("run", model=MLP(), loss_fn=loss_fn, mesh=1)
    os.chdir(other)
    assert found.checkpoints == run.checkpoints
    assert list(other.iterdir()) == []


def test_a_second_run_of_a_process_does_not_train_into_the_directory_of_the_first(ddp, tmp_path):
    def again(run):
        with pytest.raises(ConfigError, match="in use by another run of this process"):
            fit_in(tmp_path, wrapped(mesh=1), 9)
        run.stop("refused")

    assert fit_in(tmp_path, ddp, callbacks=[at(2, again)]).stopped == "refused"
    assert trained(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", Path("s3://bucket/run")])
def test_a_url_given_to_the_api_is_refused_before_a_folder_is_made(ddp, tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    given = make_batch()
    for call in (
        lambda: jddp.fit(ddp, [given], num_steps=1, run_dir=url),
        lambda: ddp.init(0, given, params=url),
        lambda: jddp.train("gpt_stdlib", **{"run.dir": str(url)}),
        lambda: jddp.open_run(url).model,
    ):
        with refused(ConfigError, r"is a URL, and only a run directory|pip install 'jddp\[s3\]'"):
            call()
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
    with refused(ConfigError, message):
        jddp.fit(wrapped(mesh=1), **given)


# A run directory may be a URL: a run resumes from it on a machine that has nothing of it.
NUMBERS, SAVING = itertools.count(), {"save_every_steps": 2}


@pytest.fixture
def url():
    return f"memory:///run-{next(NUMBERS)}"


@pytest.mark.slow
def test_a_run_at_a_url_resumes_bitwise_identically(url, tmp_path, capsys):
    first = fit(4, run_dir=url, **SAVING)
    with pytest.raises(ConfigError, match=f"{url} holds a run at step 4"):
        fit(2, run_dir=url, resume="never")
    resumed, whole = fit(8, run_dir=url, **SAVING), fit(8, run_dir=tmp_path, **SAVING)
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
    fit(6, run_dir=url, **SAVING)
    assert f"step 4 cannot be saved: process 0: {url} cannot be written: no answer" in caplog.text
    with pytest.raises(FileSystemError, match="step 8 cannot be saved"):
        fit(8, run_dir=url, **SAVING)
    monkeypatch.undo()
    assert fit(8, run_dir=url, **SAVING).step == 8
    assert "resumed from step 6 of 8" in capsys.readouterr().out


NUM_STEPS = 6
BROKEN = make_batches(4)  # of which the last holds NaN
BROKEN[3]["x"][0] = np.nan


@pytest.fixture(scope="module")
def ddp():
    return wrapped(mesh=1)


def fit_in(run_dir, ddp, num_steps=NUM_STEPS, **options):
    plan = {"num_steps": num_steps, "log_every_steps": 1, "evaluate": [make_batch(8)], **options}
    return jddp.fit(ddp, make_batches(num_steps), run_dir=run_dir, **plan)


def trained(run_dir):
    return [x["step"] for x in records(run_dir) if x["split"] == "train"]


@pytest.mark.parametrize("replace", [lambda x, y: y.rename(x), Path.symlink_to])
def test_nothing_of_a_run_is_written_into_another_one_that_takes_its_place(ddp, tmp_path, replace):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    fit_in(other, ddp, num_steps=2, save_every_steps=1)
    before = contents(other)

    def swap(run):
        while any(run_dir.glob("checkpoints/*.new")):  # or its writing makes the folder anew
            time.sleep(0.01)
        run_dir.rename(tmp_path / "moved")
        replace(run_dir, other)

    with pytest.raises(FileSystemError, match="is another directory than at the start") as failed:
        fit_in(run_dir, ddp, callbacks=[at(3, swap)], save_every_steps=2)
    assert contents(run_dir) == before
    assert failed.value.run.step == NUM_STEPS
    assert trained(tmp_path / "moved") == [1, 2, 3]
    steps = [x["step"] for x in fit_in(tmp_path / "moved", ddp).history if x["split"] == "train"]
    assert trained(tmp_path / "moved") == steps == [*range(1, NUM_STEPS + 1)]


def test_evidence_of_a_step_is_not_written_into_another_run(ddp, tmp_path, caplog):
    def swap(run):
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()

    with pytest.raises(NumericsError):
        jddp.fit(ddp, BROKEN, num_steps=4, run_dir=tmp_path / "run", callbacks=[at(2, swap)])
    assert not list((tmp_path / "run").iterdir())
    assert "another directory than at the start" in caplog.text


def test_records_that_are_lost_for_good_end_a_run_with_their_steps(ddp, tmp_path, caplog):
    fit_in(tmp_path, ddp, num_steps=2, save_every_steps=1)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 2, "split": "note", "text": "#" * 2**17}) + "\n")
    # The files of a checkpoint are smaller.
    with files_up_to(path.stat().st_size), pytest.raises(FileSystemError) as failed:
        fit_in(tmp_path, ddp, save_every_steps=1)
    failed.match(r"metrics\.jsonl: .* File too large.* steps 3 to 6 are lost \(lines: 5\)")
    assert failed.value.exit_code == 74
    assert failed.value.run.step == NUM_STEPS
    assert trained(tmp_path) == [1, 2]
    assert caplog.text.count("cannot be written") == 1
    assert fit_in(tmp_path, ddp).step == NUM_STEPS  # as after any other run


def test_records_that_can_be_written_at_last_end_well(ddp, tmp_path, caplog):
    def take(run):
        (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere")
        (tmp_path / "metrics.jsonl").mkdir()

    def give_back(run):
        (tmp_path / "metrics.jsonl").rmdir()
        (tmp_path / "elsewhere").rename(tmp_path / "metrics.jsonl")

    fit_in(tmp_path, ddp, callbacks=[at(2, take), at(5, give_back)])
    assert caplog.text.count("cannot be written: Is a directory. Lines are kept") == 1
    assert trained(tmp_path) == [*range(1, NUM_STEPS + 1)]


def test_a_signal_says_which_records_are_lost_and_the_run_is_saved(ddp, tmp_path, caplog, capsys):
    def stop(run):
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").mkdir()
        signal.raise_signal(signal.SIGTERM)

    assert fit_in(tmp_path, ddp, callbacks=[at(2, stop)]).interrupted == "SIGTERM"
    assert "metrics.jsonl: cannot be written: Is a directory. The records of step" in caplog.text


def test_a_long_history_is_read_when_it_is_asked_for(ddp, tmp_path, monkeypatch):
    fit_in(tmp_path, ddp, num_steps=3, eval_every_steps=1, save_every_steps=1)
    read, reads = MetricsFile.read, []
    monkeypatch.setattr(MetricsFile, "read", lambda *args: reads.append(1) or read(*args))
    run = fit_in(tmp_path, ddp, eval_every_steps=1)
    assert [x["step"] for x in run.evaluations] == [1, 2, 3, 4, 5, 6]
    assert not reads
    assert [x["step"] for x in run.history] == [*np.repeat(np.arange(1, 7), 2)]
    assert run.history is run.history
    assert len(reads) == 1


def test_an_evaluation_after_a_resume_at_its_own_step_is_in_the_history_once(ddp, tmp_path):
    fit_in(tmp_path, ddp, num_steps=3, eval_every_steps=1, save_every_steps=1)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))  # killed in the last one
    run = fit_in(tmp_path, ddp, eval_every_steps=1)
    want = [(i, split) for i in range(1, 7) for split in ("train", "eval")]
    assert [(x["step"], x["split"]) for x in run.history] == want


def test_a_checkpoint_s_run_data_do_not_grow_with_the_run(ddp, tmp_path):
    fit_in(tmp_path, ddp, num_steps=9, eval_every_steps=1, save_every_steps=1, keep=9)
    third, ninth = (
        json.loads((tmp_path / f"checkpoints/{step}/run.json").read_text()) for step in (3, 9)
    )
    assert [x["step"] for x in ninth["evaluations"]] == [8]  # that of step 9 came after it
    # Losses, which the next are compared with, are kept up to a number (test_spikes.py).
    assert [len(saved.pop("losses")) for saved in (third, ninth)] == [3, 9]
    assert abs(len(json.dumps(ninth)) - len(json.dumps(third))) < 100


@pytest.mark.parametrize("name", ["logs", "LOGS", "lock", "nonfinite", "wandb"])
def test_a_checkpoint_is_not_kept_in_a_folder_of_the_run_itself(ddp, tmp_path, name):
    with pytest.raises(ConfigError, match=rf"^run\.save\('{name}'\)"):
        fit_in(tmp_path, ddp, callbacks=[at(2, lambda run: run.save(name))])
    assert not (tmp_path / name.lower() / "2").exists()


def test_others_write_no_file_of_a_run_whatever_the_umask(ddp, tmp_path):
    before = os.umask(0)
    try:
        saving = {"run_dir": tmp_path / "runs" / "one", "save_every_steps": 1}
        with pytest.raises(NumericsError):
            jddp.fit(ddp, BROKEN, num_steps=4, **saving)
        saved = jddp.Checkpoints(tmp_path / "own" / "two")
        saved.save(ddp, ddp.init(0, BROKEN[0]))
        saved.wait()
    finally:
        os.umask(before)
    modes = {x: stat.S_IMODE(x.lstat().st_mode) for x in tmp_path.rglob("*")}
    assert {"logs", "nonfinite", "SHA256SUMS", "lock", "report.json"} <= {x.name for x in modes}
    closed = [tmp_path / "runs" / "one" / "checkpoints", tmp_path / "own" / "two"]
    assert {modes[x] for x in closed} == {0o700}  # as is the run directory
    assert not [x for x in modes if modes[x] & 0o022 and not {*closed} & {*x.parents}]
