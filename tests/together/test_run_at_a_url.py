"""A run directory may be a URL: the run resumes from it on a machine that has nothing of it."""

import itertools

import optax
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from states import assert_same, equal
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.checkpoint.__main__ import main as checkpoint_command
from jddp.errors import ConfigError, FileSystemError

NUMBERS = itertools.count()


@pytest.fixture
def url():
    return f"memory:///run-{next(NUMBERS)}"


def fit(num_steps, run_dir, **options):
    batches = [make_batch(seed=seed) for seed in range(num_steps)]
    ddp = jddp.DataParallel(MLP(), optax.adam(0.1), loss_fn, mesh=2)
    options |= {"run_dir": run_dir, "save_every_steps": 2, "log_every_steps": 2}
    return ddp.fit(batches, num_steps=num_steps, **options)


def test_a_run_at_a_url_resumes_bitwise_identically(url, tmp_path, capsys):
    first = fit(4, url)
    resumed, whole = fit(8, url), fit(8, tmp_path)
    assert resumed.run_dir != first.run_dir
    assert_same(resumed.state.params, whole.state.params)
    losses = [[x["loss"] for x in run.history] for run in (resumed, whole)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    equal(jddp.load(url, model=MLP()).variables["params"], whole.state.params)
    assert checkpoint_command(["verify", url]) == 0
    verified = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert verified == ["4", "6", "8"]


def test_a_url_of_another_run_is_refused(url):
    fit(2, url)
    with pytest.raises(ConfigError, match=f"{url} holds a run at step 2"):
        fit(2, url, resume="never")
    with pytest.raises(ConfigError, match="started from objects"):
        fit(2, url, config={"a": 1})


def test_a_checkpoint_that_cannot_be_uploaded_is_lost_alone(url, monkeypatch, caplog, capsys):
    put = MemoryFileSystem.put_file

    def refuse(self, path, target, **options):
        if "/checkpoints/4/" in target or "/checkpoints/8/" in target:
            raise TimeoutError("no answer")
        return put(self, path, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    fit(6, url)
    assert f"step 4 cannot be saved: process 0: {url} cannot be written: no answer" in caplog.text
    with pytest.raises(FileSystemError, match="step 8 cannot be saved"):
        fit(8, url)
    monkeypatch.undo()
    assert fit(8, url).step == 8
    assert "resumed from step 6 of 8" in capsys.readouterr().out
