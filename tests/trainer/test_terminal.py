"""Progress on pseudo-terminals of several widths and kinds, in notebooks, and in plain logs."""

import io
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import pytest
from runs import environment, run_python, write_sealed
from tiny import loss_fn, make_batches, wrapped

import jddp
from jddp.commands.checks import doctor_command as doctor
from jddp.commands.runs import checkpoint_command as checkpoint
from jddp.commands.runs import evaluate_command as evaluate
from jddp.ground import errors
from jddp.trainer.reports.lines import Course, Display, train_line

RECORD = {"step": 400, "split": "train", "loss": 0.23841, "accuracy": 0.91234, "count": 128.0}
RECORD |= {"learning_rate": 1.6e-3, "examples_per_second": 10812.0, "step_seconds": 0.02}
COURSE = Course(1170, steps_per_epoch=117.2, unit="images", best="best accuracy 0.8694 at step 300")
IN_EPOCH = RECORD | {"epoch": 3.413}
EVALUATED = {"step": 1170, "split": "eval", "loss": 0.361, "accuracy": 0.869, "examples": 1e4}
SHOWN_BELOW = "eval 1170  loss 0.361  accuracy 0.869  examples 10000"
SHOW = f"""
from jddp.trainer.reports.lines import Course, Display

course = Course(1170, "images", 117.2, best={COURSE.best!r})
progress = Display(course, is_writer=True)
progress.log({IN_EPOCH!r})
progress.log({EVALUATED!r})
progress.note("saved in " + "/".join(["folder"] * 4) + ", which is a path that can be copied")
progress.close()
"""
SIZE = struct.Struct("HHHH").pack
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURS = re.compile(r"\x1b\[[0-9;]*[39][0-9;]*m")


def on_a_terminal(columns, **variables):
    """What is written to a pseudo-terminal of so many columns."""
    size = f"import fcntl, termios; fcntl.ioctl(1, termios.TIOCSWINSZ, {SIZE(24, columns, 0, 0)})"
    spawn = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))"
    command = [sys.executable, "-c", spawn, sys.executable, "-c", f"{size}\n{SHOW}"]
    kept = environment(**{"TERM": "xterm"} | variables)
    kept = {name: x for name, x in kept.items() if name not in ("COLUMNS", "LINES")}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "check": True}
    return subprocess.run(command, env=kept, **options).stdout.decode()


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_has_live_lines_of_its_width_and_lines_above_them(columns):
    written = on_a_terminal(columns)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROLS.sub("", written))]
    assert all(len(line) <= columns for line in lines)
    indent = 11 if columns == 80 else 0  # for the bar
    assert lines[-3].endswith(train_line(IN_EPOCH, COURSE, columns - indent))
    assert lines[-2] == " " * indent + COURSE.best
    assert "eval 1170  loss 0.361" in written
    assert any("folder/folder/folder/folder," in line for line in lines)
    assert written.count("\x1b[?25h") == written.count("\x1b[?25l") == 1  # the cursor is back


def test_a_terminal_gets_no_colours_where_they_are_unwanted_and_no_controls_if_it_is_dumb():
    assert COLOURS.search(on_a_terminal(80)) is not None
    assert COLOURS.search(on_a_terminal(80, NO_COLOR="1")) is None
    plain = on_a_terminal(40, TERM="dumb").replace("\r\n", "\n")
    assert not CONTROLS.search(plain)
    assert "\r" not in plain
    assert plain.startswith(train_line(IN_EPOCH, COURSE, 40) + "\n")


@pytest.mark.parametrize("scheduler", ["SLURM_JOB_ID", "RAY_JOB_ID"])
def test_logs_are_plain_lines_of_80_columns_whatever_the_terminal_of_the_job_is(scheduler):
    variables = {scheduler: "1", "TERM": "xterm", "COLUMNS": "200", "FORCE_COLOR": "1"}
    done = run_python("-c", SHOW, **variables)
    lines = done.stdout.splitlines()
    assert not re.search("[\x1b\r]", done.stdout)
    assert lines[:2] == [train_line(IN_EPOCH, COURSE), SHOWN_BELOW]
    assert all(len(line) <= 80 for line in lines)


def test_the_remaining_time_follows_the_time_since_the_first_record(monkeypatch):
    now = iter([100.0, 160.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    course = Course(600)
    course.reach(100)
    assert train_line(RECORD, course).endswith("ETA 0:04")  # 200 steps of 0.02 s
    course.reach(400)
    assert train_line(RECORD, course).endswith("ETA 0:40")  # with evaluations: 60 s for 300 steps


HEAD, END = "step 400/1170  loss 0.2384", "ETA 0:15"
WAITS = {"step_seconds": 0.02, "data_wait_seconds": 0.0025}
RATES = {"tokens_per_second": 1.2e6, "model_flops_per_second": 3.2e15}
MFU = RATES | {"mfu": 0.41234}
MANY = {f"a_metric_with_a_long_name_{i}": 0.5 for i in range(9)}
SLOW = {"model_flops_per_second": 8.9e9}
# What a record has, the width of the line, and its middle.
LINES = [
    ({}, 80, "accuracy 0.9123  lr 0.0016  10.8k ex/s"),
    ({}, 69, "accuracy 0.9123  10.8k ex/s"),  # the learning rate goes first
    (MANY, 80, "accuracy 0.9123"),
    (WAITS, 80, "accuracy 0.9123  data wait 12 %"),
    (WAITS | {"data_wait_seconds": 0.0009}, 100, "accuracy 0.9123  lr 0.0016  10.8k ex/s"),
    (MFU, 80, "accuracy 0.9123  1.2M tokens/s  MFU 41.2 %"),
    (RATES, 100, "accuracy 0.9123  lr 0.0016  1.2M tokens/s  3.2 PFLOP/s"),
    # On a device whose peak is unknown, FLOP/s mean less than the learning rate.
    (SLOW, 80, "accuracy 0.9123  lr 0.0016  10.8k ex/s"),
]


@pytest.mark.parametrize("given, columns, middle", LINES)
def test_a_train_line_has_what_matters_most_and_fits(given, columns, middle):
    assert train_line(RECORD | given, Course(1170), columns) == f"{HEAD}  {middle}  {END}"


def report(records=(RECORD,), is_writer=True):
    progress = Display(Course(1170), is_writer=is_writer)
    for record in records:
        progress.log(record)
    progress.log(EVALUATED)
    progress.note("saved " + "here " * 30)
    progress.close()


def test_off_a_terminal_a_line_comes_every_few_seconds_and_at_the_end(monkeypatch, capsys):
    now = itertools.count(step=0.05)  # Records come every tenth of a second.
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    report([RECORD | {"step": step} for step in range(1, 1171)])
    lines = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")]
    assert (steps[0], steps[-1]) == (1, 1170)
    assert 10 < len(steps) < 40
    assert SHOWN_BELOW in lines
    assert all(len(line) <= 80 and "\r" not in line for line in lines)
    report(is_writer=False)  # of other processes
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    isatty, fileno = (lambda self: True), (lambda self: 1)


def test_on_a_terminal_there_is_one_live_line_and_without_a_standard_output_none(monkeypatch):
    monkeypatch.setattr("os.tcgetpgrp", lambda _: 1)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    (closed := io.StringIO()).close()
    broken = io.StringIO()
    broken.write = mock.Mock(side_effect=BrokenPipeError)
    for stream in (broken, None, closed, shown := Terminal()):
        monkeypatch.setattr("sys.stdout", stream)
        report()
    assert SHOWN_BELOW in shown.getvalue()
    assert "ETA 0:15" in shown.getvalue()


@pytest.fixture
def element(monkeypatch):
    """The outputs of a cell: what its element has shown, for a process in a kernel."""
    shown = type("Shown", (list,), {})()
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display = SimpleNamespace(display=lambda data, **how: shown.append(data) or handle)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return shown


def test_a_notebook_has_an_element_that_is_replaced_once_a_second_and_at_the_end(
    element, monkeypatch, capsys
):
    now = itertools.count(step=0.05)  # twice a record
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    progress = Display(COURSE, is_writer=True)
    for step in range(1, 41):
        progress.log(IN_EPOCH | {"step": step, "<b>": 0.5})
    progress.log(EVALUATED)
    assert len(element) == 5
    progress.close()
    assert element[-1]["text/plain"].startswith("step 40/1170  epoch 3.4/")
    assert element[-1]["text/plain"].endswith(f"\n{COURSE.best}")
    assert '<progress value="40" max="1170">' in element[-1]["text/html"]
    assert "&lt;b&gt; 0.5" in element[-1]["text/html"]
    assert capsys.readouterr().out == f"{SHOWN_BELOW}\n"
    Display(COURSE, is_writer=False)
    assert len(element) == 6


def test_a_front_end_that_fails_is_reported_once_and_the_run_continues(element, caplog):
    progress = Display(Course(100), is_writer=True)
    element.append = None  # cannot be called
    for step in (1, 2):
        progress.log(RECORD | {"step": step})
        progress.close()
    (message,) = [x.message for x in caplog.records if x.name == "jddp"]
    assert "The notebook cannot show progress: TypeError" in message


EVIL, SHOWN = "\x1b[2J\x9b\u202e", r"\x1b[2J\x9b\u202e"
FORGED = f"{EVIL}\neval 9  loss 0"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def with_metric(model, batch, train):
    losses, _ = loss_fn(model, batch, train)
    return losses, {FORGED: jnp.ones(len(losses))}


@pytest.fixture
def printed(capfd):
    """What was printed since the last call or is in logs, with the name as it is to be shown."""

    def read(*logs):
        text = "".join((*capfd.readouterr(), *(log.read_text() for log in logs)))
        assert SHOWN in text
        assert not FORBIDDEN.search(text)
        assert "\neval 9" not in text
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
    ddp = wrapped(loss=with_metric, mesh=1)
    batches = make_batches(2)
    for _ in range(2):  # the second time it is finished
        jddp.fit(ddp, batches, num_steps=2, evaluate=batches, run_dir=run_dir, log_every_steps=1)
        printed()
    printed(*(run_dir / "logs").glob("*.log"))


def test_commands_print_names_of_a_run_as_escapes(tmp_path, printed):
    run_dir = tmp_path / EVIL
    jddp.fit(wrapped(mesh=1), make_batches(2), num_steps=2, run_dir=run_dir)
    folder = run_dir / "checkpoints" / "2"
    about = json.loads((folder / "run.json").read_text())
    write_sealed(folder, "run.json", json.dumps(about | {"evaluations": [{FORGED: 1}]}))
    assert checkpoint(["list", str(run_dir)]) == 0
    printed()
    (folder / EVIL).touch()
    (folder / "arrays.json").write_text("{}")
    assert checkpoint(["verify", str(run_dir)]) == 74
    printed()
    assert evaluate([str(run_dir)]) != 0
    printed()
    shutil.rmtree(run_dir / "checkpoints")
    assert doctor([str(run_dir)]) == 0
    printed()
