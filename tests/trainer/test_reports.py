import json
import logging
import os
import socket
import tempfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from runs import contents, refused

from jddp.checkpoint import checkpoints
from jddp.distributed import coordination
from jddp.ground.errors import ConfigError, DataError, FileSystemError
from jddp.trainer.reports.files import MetricsFile, logging_to, say
from jddp.trainer.reports.run_directory import RunDirectory

CONFIG = {"seed": 1, "run": {"dir": "a"}, "optimizer": {"learning_rate": 1e-3, "kwargs": {}}}
MANIFEST = {"versions": {"jax": "0.10.2"}, "data": {"sha256": "f" * 64}, "world": (1, 8)}
OTHER_DATA = {**MANIFEST, "data": {"sha256": "0" * 64}}


def prepared(path, config=CONFIG, manifest=MANIFEST, is_writer=True):
    with (directory := RunDirectory(path, is_writer=is_writer)).held(config, manifest):
        return directory


def begun(path, config=CONFIG, manifest=MANIFEST):
    """The directory of a run that has taken a step."""
    prepared(path, config, manifest).metrics.log({"step": 1, "split": "train"})


def test_a_run_directory_is_made_with_config_and_manifest_which_come_back_without_a_trace(tmp_path):
    directory = prepared(tmp_path / "runs" / "one")
    assert (directory.path / "config.yaml").read_text().startswith("seed: 1\n")
    assert json.loads((directory.path / "manifest.json").read_text())["world"] == [1, 8]
    assert directory.checkpoints == directory.path / "checkpoints"
    before = contents(tmp_path)
    prepared(directory.path, {**CONFIG, "run": {"dir": "b"}})
    assert contents(tmp_path) == before


def test_all_processes_check_and_only_the_writer_writes(tmp_path):
    prepared(tmp_path / "new", is_writer=False).metrics.log({"step": 1})
    assert not (tmp_path / "new").exists()
    begun(tmp_path)
    before = contents(tmp_path)
    for is_writer in (True, False):
        with pytest.raises(ConfigError, match="seed is 1 there, 2 here"):
            prepared(tmp_path, {**CONFIG, "seed": 2}, is_writer=is_writer)
    assert contents(tmp_path) == before


def test_a_directory_of_a_run_of_another_kind_or_of_something_else_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("precious\n")
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl of something else"):
        prepared(tmp_path)
    assert contents(tmp_path) == {Path("metrics.jsonl"): b"precious\n"}
    for _ in range(2):
        begun(tmp_path / "objects", None)
        prepared(tmp_path / "settings", {"data": "mnist"})  # of any form
    assert (tmp_path / "settings" / "config.yaml").read_text() == "data: mnist\n"
    with pytest.raises(ConfigError, match="started from objects"):
        prepared(tmp_path / "objects")
    begun(tmp_path / "config")
    with pytest.raises(ConfigError, match="started from a config"):
        prepared(tmp_path / "config", None)


def test_a_directory_is_taken_over_from_a_run_that_never_took_a_step(tmp_path, caplog):
    other = {**CONFIG, "seed": 2}
    cases = (other, MANIFEST), (None, MANIFEST), (CONFIG, OTHER_DATA)
    for number, (config, manifest) in enumerate(cases):
        path = prepared(tmp_path / str(number)).path
        (path / "checkpoints").mkdir()
        (path / "metrics.jsonl").write_text("a note\n")
        caplog.clear()
        prepared(path, config, manifest, is_writer=False)  # waits for the writer
        assert not caplog.records
        prepared(path, config, manifest)
        assert "taken over from a run that ended before its first step" in caplog.text
        caplog.clear()
        prepared(path, config, manifest)
        assert not caplog.records
        assert "later_starts" not in json.loads((path / "manifest.json").read_text())
    for name in ("checkpoints/4", "checkpoints/4.damaged", "best/2"):
        path = prepared(tmp_path / name.replace("/", "-")).path
        (path / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match="another config"):
            prepared(path, other)
    used = prepared(tmp_path / "used")
    before = contents(used.path)
    in_use = pytest.raises(ConfigError, match="in use by another run of this process")
    with used.held(CONFIG, MANIFEST), in_use:
        prepared(used.path, other)
    assert contents(used.path) == before


def test_other_data_under_the_same_config_are_refused(tmp_path):
    begun(tmp_path)
    with pytest.raises(DataError, match="started with other data.*checkpoint.allow_changed"):
        prepared(tmp_path, manifest=OTHER_DATA)
    prepared(tmp_path, {**CONFIG, "checkpoint": {"allow_changed": ["data"]}}, manifest=OTHER_DATA)
    prepared(tmp_path, manifest=OTHER_DATA)  # now known
    prepared(tmp_path)


def test_a_start_on_other_versions_is_added_to_the_manifest_or_makes_one_after_a_death(tmp_path):
    prepared(tmp_path)
    (tmp_path / "manifest.json").unlink()
    prepared(tmp_path)
    for _ in range(2):
        prepared(tmp_path, manifest={**MANIFEST, "versions": {"jax": "0.11"}})
    kept = json.loads((tmp_path / "manifest.json").read_text())
    assert kept["versions"] == {"jax": "0.10.2"}
    assert [start["versions"] for start in kept["later_starts"]] == [{"jax": "0.11"}]


def test_the_log_of_a_process_begins_with_its_host_and_command_and_events_have_facts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "jddp.train", "run.dir=a b", "x=\n\x1b"])

    def fail():
        say("more")
        say("step 3/4", "step", step=3, num_steps=4)
        logging.getLogger("jddp").warning("A disk is full.")
        raise KeyError("x")

    with pytest.raises(KeyError), logging_to(tmp_path / "log", tmp_path / "events"):
        fail()
    lines = (tmp_path / "log").read_text().splitlines()
    begin = f"begins: process {os.getpid()} on {socket.gethostname()}"
    command = "command: python -m jddp.train 'run.dir=a b' 'x=\\n\\x1b'"
    said = [line.partition(" INFO ")[2] for line in lines[:4]]
    assert said == [begin, command, "more", "step 3/4"]
    assert lines[-1] == "KeyError: 'x'"
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert all(datetime.fromisoformat(event.pop("time")) for event in events)
    assert events == [
        {"kind": "begin", "host": socket.gethostname(), "text": begin},
        {"kind": "step", "step": 3, "num_steps": 4, "text": "step 3/4"},
        {"kind": "warning", "text": "A disk is full."},
        {"kind": "failed", "error": "KeyError: 'x'", "text": "ended by:"},
    ]


OTHER_LINES = [b"# a note", b'{"note": "no step"}', b"[1, 2]", b'"text"', b'{"step": "3"}']
OTHER_LINES += [b"caf\xe9", b"[" * 9999]


def test_metrics_are_cut_after_a_step_and_lines_of_somebody_else_are_kept_and_passed_over(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log({"step": 1, "loss": 0.5})
    with metrics.path.open("ab") as file:
        file.writelines(line + b"\n" for line in OTHER_LINES)
    for step, split in ((2, "train"), (3, "train"), (2, "eval")):
        metrics.log({"step": step, "split": split})
    with metrics.path.open("ab") as file:
        file.write(b'{"step": 4, "lo')  # and here a process died
    assert [record["step"] for record in metrics.read()] == [1, 2, 3, 2]
    metrics.resume_at(2)
    kept = [b'{"step": 2, "split": "train"}', b'{"step": 2, "split": "eval"}']
    lines = metrics.path.read_bytes().splitlines()
    assert lines == [b'{"step": 1, "loss": 0.5}', *OTHER_LINES, *kept]
    assert [record["step"] for record in metrics.read()] == [1, 2, 2]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_metrics_keep_every_digit_lines_stay_json_and_what_cannot_be_read_is_an_error(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log({"step": 1, "loss": 0.1 + 0.2, "bad": float("nan"), "a": [[1, float("inf")]]})
    with metrics.path.open("ab") as file:
        file.write(b'{"step": 2, "spl')  # a full disk: the next line does not continue it
    metrics.log({"step": 3, "b": np.ones(2), "c": np.float32(0.5)})
    first = {"step": 1, "loss": 0.1 + 0.2, "bad": None, "a": [[1, None]]}
    assert metrics.read() == [first, {"step": 3, "b": [1.0, 1.0], "c": 0.5}]
    metrics.close()
    assert metrics.lost is None
    assert MetricsFile(tmp_path / "none").read() == []
    metrics = MetricsFile(tmp_path)
    for act in (metrics.read, lambda: metrics.resume_at(1)):
        with pytest.raises(FileSystemError, match=f"{tmp_path.name}: cannot be read"):
            act()


MANIFESTS = ["", '{"versions": ', "[]", '"x"', "null", "[" * 9999, '{"later_starts": 5}']
MANIFESTS += ['{"later_starts": [3]}', '{"data": "x"}', '{"data": {"sha256": 7}}']


@pytest.mark.parametrize("damage", MANIFESTS, ids=lambda text: ascii(text[:20]))
def test_a_manifest_of_another_form_is_a_file_system_error(tmp_path, damage):
    prepared(tmp_path)
    (tmp_path / "manifest.json").write_bytes(damage.encode(errors="surrogateescape"))
    with refused(FileSystemError, r"manifest\.json is damaged: .*\. Restore it"):
        prepared(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "lock", "metrics.jsonl", "logs"])
def test_something_else_in_the_place_of_a_file_of_the_run_is_a_file_system_error(tmp_path, name):
    directory, path = prepared(tmp_path), tmp_path / name
    path.unlink(missing_ok=True)
    path.write_text("") if name == "logs" else path.mkdir()
    with refused(FileSystemError, name), directory.held(CONFIG, MANIFEST), directory.logging(0):
        directory.metrics.resume_at(1)


@pytest.fixture
def folder_of_somebody():
    """A folder of a user who is not root, to whom permissions apply."""
    with tempfile.TemporaryDirectory() as folder:
        if is_root := os.geteuid() == 0:
            os.chown(folder, 54321, -1)
            os.setresuid(54321, 54321, 0)
        yield Path(folder)
        if is_root:
            os.setresuid(0, 0, 0)


UNUSABLE = {
    "a file": ("one", lambda path: path.write_text("")),
    "below a file": ("one/run", lambda path: path.parent.write_text("")),
    "a link to nowhere": ("one", lambda path: path.symlink_to("nowhere")),
    "a link to itself": ("one", lambda path: path.symlink_to(path)),
    "a closed folder": ("one", lambda path: path.mkdir(0o500)),
    "below one that cannot be seen into": ("a/b/c", lambda path: path.parents[1].mkdir(0)),
}


@pytest.mark.parametrize("name, make", UNUSABLE.values(), ids=UNUSABLE)
def test_a_run_directory_of_no_use_is_found_without_writing(folder_of_somebody, name, make):
    make(path := folder_of_somebody / name)
    with pytest.raises(FileSystemError, match=rf"^run\.dir {path}: .*Choose a folder"):
        RunDirectory(path, is_writer=True).check_usable()


def test_a_run_directory_that_no_disk_could_make_is_refused_and_one_it_can_left_as_is(tmp_path):
    for path in (tmp_path, tmp_path / "new" / "run"):
        RunDirectory(path, is_writer=True).check_usable()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for name in ("x" * 300, "a\0b", "file/run"):
        with pytest.raises(FileSystemError, match=r"^run\.dir "):
            prepared(tmp_path / name)


def test_on_a_full_disk_a_log_is_reported_once(tmp_path, capsys):
    directory = prepared(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "process_0.log").symlink_to("/dev/full")
    with directory.logging(0):
        for step in range(300):
            say(f"step {step}")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("process_0.log: cannot be written: No space left on device.")


def test_a_process_that_does_not_see_the_directory_of_process_0_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SEEN_SECONDS", 0.1)
    paths = [tmp_path / name for name in ("there", "elsewhere")]
    for path in paths:
        path.mkdir()
    (paths[1] / "lock").write_text("process 1 on another host\n")  # which was killed here
    with RunDirectory(paths[0], is_writer=True).held(None, {}):
        holder = (paths[0] / "lock").read_text()
        monkeypatch.setattr(coordination, "from_first", lambda *_, **how: holder)
        first, other = (RunDirectory(path, is_writer=False) for path in paths)
        first.check_seen()
        with pytest.raises(FileSystemError, match="Process 0 does not see .*elsewhere/lock"):
            other.check_seen()
