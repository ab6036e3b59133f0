"""The page of a run is made of whatever is there of its directory, and loads nothing."""

import json
import random
import re

import pytest

from jddp.config.files import dump_values, load_config
from jddp.ground.errors import ExitCode
from jddp.trainer.reports.run_directory import held, holder_of
from jddp.workbench.facts import read_facts, read_history
from jddp.workbench.report import main
from jddp.workbench.run_page import SECTIONS, draw_run

EVENTS = """\
10:00:00.000 begin {"host": "node1"}
10:00:00.900 first step {"step": 1}
10:00:10.000 step {"step": 10, "num_steps": 40}
10:00:20.000 step {"step": 20, "num_steps": 40}
10:00:25.000 eval {"step": 20}
10:00:26.500 warning {"text": "The disk of \\"node1\\" is <slow>."}
11:00:00.000 begin {"host": "node2"}
11:00:01.000 resumed {"step": 10, "start_seconds": 0.4, "restore_seconds": 0.7}
11:00:01.500 first step {"step": 11}
11:00:02.000 skipped {"step": 13}
11:00:10.000 step {"step": 20, "num_steps": 40}
11:00:19.000 spike {"step": 27}
11:00:20.000 step {"step": 30, "num_steps": 40}
11:00:30.000 step {"step": 40, "num_steps": 40}
"""
EVALUATION = {
    "confusion": [[90.0, 10.0], [20.0, 80.0]],
    "recall": [0.9, None],
    "loss_by_position": [3.0, 2.0, 1.5, 1.2, 1.1],
}
CLASSES = ["shirt <b>", "boot"]


def lines_of(events):
    """The lines of a file of events, which are given by time, kind and facts."""
    for event in events.splitlines():
        time, kind, facts = re.fullmatch(r"(\S+) ([^{]+) (.*)", event).groups()
        yield json.dumps(
            {"time": f"2026-01-01T{time}", "kind": kind, "text": ""} | json.loads(facts)
        )


@pytest.fixture
def run(tmp_path):
    """A run directory with all that a run leaves."""
    times = {"step_seconds": 1.0, "data_wait_seconds": 0.02}
    memory = {"peak_memory_bytes": 3 * 2**30, "memory_limit_bytes": 4 * 2**30}
    lines = [
        {"step": step, "split": "train", "loss": 2 / step, "learning_rate": 0.1, **times, **memory}
        for step in range(1, 41)
    ]
    evaluated = {"split": "eval", "loss": 0.1, "accuracy": 0.85, "examples": 200}
    lines.append({"step": 40, **evaluated, **EVALUATION})
    for step in range(1, 101):
        lines.append({"step": step, "split": "callback", "sample": f"<text {step}>", "score": 1.0})
    config, _ = load_config([], {"train.num_steps": 40, "run.dir": str(tmp_path)})
    files = {
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "config.yaml": dump_values(config.model_dump()),
        "manifest.json": json.dumps({"versions": {"jax": "1.2"}, "data": {"classes": CLASSES}}),
        "lock": "",
        "logs/events.jsonl": "\n".join(lines_of(EVENTS)) + "\n",
        "checkpoints/40/run.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def heads(html):
    return re.findall("<h2>(.*?)</h2>", html)


def test_a_page_has_all_sections_in_order_and_loads_nothing(run):
    html = draw_run(read_facts(run))
    assert heads(html) == [x for x in SECTIONS if x != "Left out"]
    for words in (
        "0.85</b>best accuracy",
        "for 40 of 40 steps",
        "used 3 GiB (75%)",
        "39.2 s (69%)",
    ):
        assert words in html
    assert not re.search(r"https?:|src=|@import|url\(|<link", html)
    texts = [int(x) for x in re.findall(r"<pre>&lt;text (\d+)&gt;</pre>", html)]
    assert (texts[0], texts) == (100, sorted(texts, reverse=True))
    assert 5 <= len(texts) <= 9  # the newest of a callback, and some earlier ones


def test_starts_and_marks_are_read_from_the_events(run):
    history = read_history(run / "logs" / "events.jsonl")
    first, second = history.starts
    assert (first.host, first.last_step, first.seconds) == ("node1", 20, 26.5)
    assert (second.host, second.resumed_from, second.last_step) == ("node2", 10, 40)
    assert (history.num_steps, history.pause_seconds) == (40, 5.0)
    steps = {kind: [mark.step for mark in marks] for kind, marks in history.events.items()}
    assert steps == {"warning": [20], "resumed": [10], "skipped": [13], "spike": [27]}
    assert read_facts(run).goodput == pytest.approx(40 / 56.5)


def test_the_page_shows_what_a_failure_cost_in_steps_and_in_seconds_by_phase(run):
    html = draw_run(read_facts(run))
    phases = "3,573.9 down, 0.4 start, 0.7 restore, 1.5 first step"
    pause = f"3,576.5 s until the next step: {phases}"
    assert f"lost 10 steps (12.7 s)<br>{pause}</td>" in html
    assert f"kept; failures: lost 10 steps (12.7 s); {pause}</div>" in html


@pytest.mark.parametrize(
    "end, steps, seconds",
    [
        ('signal {"step": 10}', 0, 0),
        ('stopped {"step": 10}', 0, 0),
        ('step {"step": 10, "num_steps": 10}', 0, 0),  # All steps were taken.
        ('step {"step": 12, "num_steps": 12}', 2, 60),  # It died before the last save.
        ('step {"step": 10, "num_steps": 40}', 0, 60),
        ('failed {"error": "E"}', 0, 61),
        ('warning {"text": "slow"}', 0, 61),
    ],
)
def test_a_start_that_ended_in_order_is_no_failure(tmp_path, end, steps, seconds):
    events = f"""\
10:00:00 begin {{}}
10:00:01 step {{"step": 9}}
10:00:02 {end}
10:01:00 begin {{}}
10:01:00 resumed {{"step": 10}}
10:01:02 step {{"step": 11}}"""
    (tmp_path / "events").write_text("\n".join(lines_of(events)) + "\n")
    cost = read_history(tmp_path / "events").cost
    assert (cost.lost_steps, cost.pause_seconds) == (steps, seconds)


def test_arrays_become_a_matrix_scores_of_classes_and_a_curve_and_texts_are_escaped(run):
    html = draw_run(read_facts(run))
    for words in (">90</td>", "shirt &lt;b&gt;", "<b>loss_by_position</b>", "is &lt;slow&gt;"):
        assert words in html
    assert "shirt <b>" not in html


def test_lines_that_are_no_records_are_counted_and_half_a_line_at_the_end_is_not(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "split": "layers", "gradient_norm/a": 1}\n')
        file.write('[1]\nnot json\n{"step": "x"}\n{"step": 41, "split": "tr')
    facts = read_facts(run)
    assert (facts.records.num_strange, facts.records.num_train) == (3, 40)
    assert "3 lines are no records" in draw_run(facts)


def test_a_run_that_is_running_says_which_process_runs_it(run):
    assert holder_of(run / "lock") == ""
    with held(run / "lock"):
        facts = read_facts(run)
        assert facts.holder == "another run of this process"
        assert "for 40 of 40 steps, running: another run" in draw_run(facts)
    (run / "lock").write_text("process 1 on a host that was lost")
    assert read_facts(run).holder == ""


ODD = ["null", "NaN", "1e999", "-1e308", "[]", "[1,[2]]", "{}", "true", "9" * 30, "[[1],[null]]"]


def test_an_empty_directory_has_a_page_that_says_so(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert heads(draw_run(read_facts(tmp_path))) == ["Left out"]


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_or_foreign_run_has_a_page(run, seed):
    rng = random.Random(seed)
    for name in ("metrics.jsonl", "config.yaml", "manifest.json", "logs/events.jsonl"):
        parts = re.split(r"(\d+(?:\.\d+)?)", (run / name).read_text())
        odd = [rng.choice(ODD) if i % 2 and rng.random() < 0.1 else x for i, x in enumerate(parts)]
        content = bytearray("".join(odd).encode())
        for _ in range(rng.choice([0, 3, 50])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (run / name).write_bytes(content[: rng.choice([len(content), len(content) // 2])])
    html = draw_run(read_facts(run))
    assert html.startswith("<!DOCTYPE html>")
    assert not re.search("nan|inf", " ".join(re.findall(' d="([^"]*)"', html)))


def test_the_command_prints_the_verdict_and_writes_the_page(run, tmp_path, capsys):
    assert main([str(run)]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("too short to tell\n")
    assert main([str(run), "--out", str(tmp_path / "page.html")]) == ExitCode.DONE
    assert (tmp_path / "page.html").read_bytes() == (run / "report.html").read_bytes()


MISTAKES = [
    (["nowhere"], ExitCode.USAGE, "is no run directory"),
    (["s3://bucket/run"], ExitCode.USAGE, "--out FILE"),
    ([".", "--out", "no/such/page.html"], ExitCode.FILE_SYSTEM, "cannot be written"),
]


@pytest.mark.parametrize("arguments, code, words", MISTAKES)
def test_mistakes_are_one_line(arguments, code, words, run, monkeypatch, capsys):
    monkeypatch.chdir(run)
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
