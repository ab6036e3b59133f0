"""What a run writes into its directory, where that or its disk changes under it."""

import contextlib
import itertools
import json
import os
import resource
import signal
import stat
import time
from pathlib import Path

import optax
import pytest
from runs import contents, records
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.ground.errors import ConfigError, FileSystemError, NumericsError
from jddp.trainer.reports.files import MetricsFile

NUM_STEPS = 6


@pytest.fixture(scope="module")
def ddp():
    return jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)


class At(jddp.Callback):
    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, run, metrics):
        if metrics["step"] == self.step:
            self.action(run)


def fit(ddp, run_dir, num_steps=NUM_STEPS, **options):
    batches = [make_batch(8, seed=seed) for seed in range(num_steps)]
    plan = {"num_steps": num_steps, "log_every_steps": 1, **options}
    return jddp.fit(ddp, batches, evaluate=[make_batch(8)], run_dir=run_dir, **plan)


def trained(run_dir):
    return [x["step"] for x in records(run_dir) if x["split"] == "train"]


@pytest.mark.parametrize("replace", [lambda x, y: y.rename(x), Path.symlink_to])
def test_nothing_of_a_run_is_written_into_another_one_that_takes_its_place(ddp, tmp_path, replace):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    fit(ddp, other, num_steps=2, save_every_steps=1)
    before = contents(other)

    def swap(run):
        while any(run_dir.glob("checkpoints/*.new")):  # or its writing makes the folder anew
            time.sleep(0.01)
        run_dir.rename(tmp_path / "moved")
        replace(run_dir, other)

    with pytest.raises(FileSystemError, match="is another directory than at the start") as failed:
        fit(ddp, run_dir, callbacks=[At(3, swap)], save_every_steps=2)
    assert contents(run_dir) == before
    assert failed.value.run.step == NUM_STEPS
    assert trained(tmp_path / "moved") == [1, 2, 3]
    run = fit(ddp, tmp_path / "moved")
    assert (
        trained(tmp_path / "moved")
        == [*range(1, NUM_STEPS + 1)]
        == [x["step"] for x in run.history if x["split"] == "train"]
    )


def test_evidence_of_a_step_is_not_written_into_another_run(tmp_path, caplog):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)
    batches = [make_batch(8, seed=seed) for seed in range(4)]
    batches[3]["x"][0] = float("nan")

    def swap(run):
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()

    with pytest.raises(NumericsError):
        jddp.fit(ddp, batches, num_steps=4, run_dir=tmp_path / "run", callbacks=[At(2, swap)])
    assert not list((tmp_path / "run").iterdir())
    assert "another directory than at the start" in caplog.text


@contextlib.contextmanager
def files_up_to(size):
    """No file of this process may become larger, as under `ulimit -f`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_that_are_lost_for_good_end_a_run_with_their_steps(ddp, tmp_path, caplog):
    fit(ddp, tmp_path, num_steps=2, save_every_steps=1)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 2, "split": "note", "text": "#" * 2**17}) + "\n")
    # The files of a checkpoint are smaller.
    with files_up_to(path.stat().st_size), pytest.raises(FileSystemError) as failed:
        fit(ddp, tmp_path, save_every_steps=1)
    lost = (
        r"metrics\.jsonl: cannot be written: File too large\. The records of steps 3 to 6 are lost"
    )
    failed.match(rf"^{tmp_path}/{lost} \(lines: 5\); checkpoints are not\.$")
    assert failed.value.exit_code == 74
    assert failed.value.run.step == NUM_STEPS
    assert trained(tmp_path) == [1, 2]
    assert caplog.text.count("cannot be written") == 1
    run = fit(ddp, tmp_path)  # as after any other run
    assert run.step == NUM_STEPS


def test_records_that_can_be_written_at_last_end_well(ddp, tmp_path, caplog):
    def take(run):
        (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere")
        (tmp_path / "metrics.jsonl").mkdir()

    def give_back(run):
        (tmp_path / "metrics.jsonl").rmdir()
        (tmp_path / "elsewhere").rename(tmp_path / "metrics.jsonl")

    fit(ddp, tmp_path, callbacks=[At(2, take), At(5, give_back)])
    assert caplog.text.count("cannot be written: Is a directory. Lines are kept") == 1
    assert trained(tmp_path) == [*range(1, NUM_STEPS + 1)]


def test_a_signal_says_which_records_are_lost_and_the_run_is_saved(ddp, tmp_path, caplog, capsys):
    def stop(run):
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").mkdir()
        signal.raise_signal(signal.SIGTERM)

    run = fit(ddp, tmp_path, callbacks=[At(2, stop)])
    assert run.interrupted == "SIGTERM"
    assert "metrics.jsonl: cannot be written: Is a directory. The records of step" in caplog.text


def test_a_long_history_is_read_when_it_is_asked_for(ddp, tmp_path, monkeypatch):
    fit(ddp, tmp_path, num_steps=3, eval_every_steps=1, save_every_steps=1)
    read, reads = MetricsFile.read, []
    monkeypatch.setattr(MetricsFile, "read", lambda *args: reads.append(1) or read(*args))
    run = fit(ddp, tmp_path, eval_every_steps=1)
    assert [x["step"] for x in run.evaluations] == [1, 2, 3, 4, 5, 6]
    assert not reads
    steps = [x["step"] for x in run.history]
    assert steps == [*itertools.chain(*((i, i) for i in range(1, 7)))]
    assert run.history is run.history
    assert len(reads) == 1


def test_an_evaluation_after_a_resume_at_its_own_step_is_in_the_history_once(ddp, tmp_path):
    fit(ddp, tmp_path, num_steps=3, eval_every_steps=1, save_every_steps=1)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))  # killed in the last one
    run = fit(ddp, tmp_path, eval_every_steps=1)
    want = [(i, split) for i in range(1, 7) for split in ("train", "eval")]
    assert [(x["step"], x["split"]) for x in run.history] == want


def test_a_checkpoint_s_run_data_do_not_grow_with_the_run(ddp, tmp_path):
    fit(ddp, tmp_path, num_steps=9, eval_every_steps=1, save_every_steps=1, keep=9)
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
        fit(ddp, tmp_path, callbacks=[At(2, lambda run: run.save(name))])
    assert not (tmp_path / name.lower() / "2").exists()


def test_others_write_no_file_of_a_run_whatever_the_umask(ddp, tmp_path):
    before = os.umask(0)
    try:
        batches = [make_batch(8, seed=seed) for seed in range(4)]
        batches[3]["x"][0] = float("nan")
        with pytest.raises(NumericsError):
            jddp.fit(
                ddp, batches, num_steps=4, run_dir=tmp_path / "runs" / "one", save_every_steps=1
            )
        saved = jddp.Checkpoints(tmp_path / "own" / "two")
        saved.save(ddp, ddp.init(0, batches[0]))
        saved.wait()
    finally:
        os.umask(before)
    modes = {x: stat.S_IMODE(x.lstat().st_mode) for x in tmp_path.rglob("*")}
    assert {"logs", "nonfinite", "SHA256SUMS", "lock", "report.json"} <= {x.name for x in modes}
    closed = [tmp_path / "runs" / "one" / "checkpoints", tmp_path / "own" / "two"]
    assert {modes[x] for x in closed} == {0o700}  # as is the run directory
    assert not [x for x in modes if modes[x] & 0o022 and not {*closed} & {*x.parents}]
