"""Names from anywhere, on a terminal and in a log: none of them is a command to the terminal."""

import json
import re
import shutil

import jax.numpy as jnp
import optax
import pytest
from runs import write_sealed
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.commands.checkpoint import main as checkpoint
from jddp.commands.checks import doctor_command as doctor
from jddp.commands.runs import evaluate_command as evaluate
from jddp.ground import errors

EVIL, SHOWN = "\x1b[2J\x9b\u202e", r"\x1b[2J\x9b\u202e"
FORGED = f"{EVIL}\neval 9  loss 0"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def with_metric(model, batch, train):
    losses, _ = loss_fn(model, batch, train)
    return losses, {FORGED: jnp.ones(len(losses))}


def check(text):
    assert SHOWN in text
    assert not FORBIDDEN.search(text)


@pytest.fixture
def printed(capfd):
    """What was printed since the last call, which holds the name as it is to be shown."""

    def read():
        text = "".join(capfd.readouterr())
        check(text)
        return text

    return read


def test_characters_that_are_not_to_be_printed_are_escaped_and_others_stay():
    text = "Grüße, 数据 🙂 C:\\x\t|"
    assert errors.printable(text) == text
    odd = "\x1b[2J\x9b\r\n\x7f\0\u202e\u2066\u2028\udcff"
    assert errors.printable(odd) == r"\x1b[2J\x9b\r\n\x7f\x00\u202e\u2066\u2028\udcff"
    assert errors.printable_lines("one\ntwo\r") == "one\ntwo\\r"


def test_a_run_prints_and_logs_the_names_of_its_directory_and_metrics_as_escapes(tmp_path, printed):
    run_dir = tmp_path / EVIL
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), with_metric, mesh=1)
    batches = [make_batch(8)] * 2
    for _ in range(2):  # the second time it is finished
        jddp.fit(ddp, batches, num_steps=2, evaluate=batches, run_dir=run_dir, log_every_steps=1)
        assert "\neval 9" not in printed()
    (log,) = (run_dir / "logs").glob("*.log")
    text = log.read_text()
    check(text)
    assert "\neval 9" not in text


def test_commands_print_names_of_a_run_as_escapes(tmp_path, printed):
    run_dir = tmp_path / EVIL
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)
    jddp.fit(ddp, [make_batch(8)] * 2, num_steps=2, run_dir=run_dir)
    folder = run_dir / "checkpoints" / "2"
    about = json.loads((folder / "run.json").read_text())
    write_sealed(folder, "run.json", json.dumps(about | {"evaluations": [{FORGED: 1}]}))
    assert checkpoint(["list", str(run_dir)]) == 0
    assert "\neval 9" not in printed()
    (folder / EVIL).touch()
    (folder / "arrays.json").write_text("{}")
    assert checkpoint(["verify", str(run_dir)]) == 74
    printed()
    assert evaluate([str(run_dir)]) != 0
    printed()
    shutil.rmtree(run_dir / "checkpoints")
    assert doctor([str(run_dir)]) == 0
    printed()
