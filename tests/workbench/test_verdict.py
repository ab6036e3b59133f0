"""The verdict on ten made-up runs is right, and comes with its evidence and a next step."""

import json
import math
import random

import pytest

from jddp.workbench.facts import read_facts
from jddp.workbench.verdict import judge

GIB = 2**30
CLASSES = {"data": {"classes": ["a", "b", "c", "d", "e"]}}


def falling(step, end=0.2, over=150):
    """A loss that falls from 2.3 and has converged after some steps."""
    return end + (2.3 - end) * math.exp(-step / over)


def train(num_steps=1000, loss=falling, noise=0.02, **fields):
    """Train records, every 10 steps; a field that is a function has the step."""
    rng = random.Random(0)
    records = []
    for step in range(10, num_steps + 1, 10):
        own = {"step_seconds": 0.1, "data_wait_seconds": 0.001} | fields
        own = {name: x(step) if callable(x) else x for name, x in own.items()}
        value = loss(step)
        value = None if value is None else value + rng.gauss(0, noise)
        records.append({"step": step, "split": "train", "loss": value, **own})
    return records


def evaluations(num_steps=1000, loss=falling, accuracy=lambda step: 0.9 - 0.7 / (1 + step / 100)):
    values = [(step, loss(step), accuracy(step)) for step in range(100, num_steps + 1, 100)]
    return [
        {"step": step, "split": "eval", "loss": x, "accuracy": y, "examples": 1000}
        for step, x, y in values
    ]


def rising(step):
    """An evaluation loss that is lowest at step 300."""
    return 0.5 + abs(step - 300) / 1000


def events_of(*starts):
    """Events with a start for each pair of first and last step, an hour apart."""
    lines = []
    for hour, (first, last) in enumerate(starts):
        events = [{"kind": "begin", "host": f"node{hour}"}]
        events += [{"kind": "resumed", "step": first}] * bool(first)
        steps = range(first + 10, last + 1, 10)
        events += [{"kind": "step", "step": x, "num_steps": 1000} for x in steps]
        for i, event in enumerate(events):
            time = f"2026-01-01T0{hour}:{i // 60:02}:{i % 60:02}"
            lines.append(json.dumps({"time": time, "text": "", **event}))
    return "\n".join(lines) + "\n"


def run(evaluate=evaluations, **fields):
    return train(**fields) + evaluate()


RUNS = {
    "bound by input: 64% of a step waits for data": run(data_wait_seconds=0.064),
    "diverging: the training loss rises again": train(
        loss=lambda step: falling(step) + max(0, (step - 600) / 100)
    ),
    "overfitting since step 300": run(
        lambda: evaluations(loss=rising), loss=lambda step: falling(step, end=0.02, over=300)
    ),
    "memory is nearly full: 96% of a device's is taken": run(
        peak_memory_bytes=72 * GIB, memory_limit_bytes=75 * GIB
    ),
    "at chance: accuracy 0.21 is no better than guessing among 5 classes": run(
        lambda: evaluations(accuracy=lambda step: 0.21), loss=lambda step: 1.61
    ),
    "12 steps were skipped": run(skipped=lambda step: float(min(12, step // 50))),
    "healthy: best accuracy 0.836 at step 1,000; still improving": run(),
    "too short to tell": run(lambda: evaluations(100), num_steps=50),
}


@pytest.fixture
def make(tmp_path):
    """Makes a run directory of records, log and manifest."""

    def make(records, log="", manifest=None):
        lines = sorted(records, key=lambda record: record["step"])
        text = "".join(json.dumps(record) + "\n" for record in lines)
        (tmp_path / "metrics.jsonl").write_text(text)
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "events.jsonl").write_text(log)
        (tmp_path / "manifest.json").write_text(json.dumps(manifest or {}))
        return tmp_path

    return make


@pytest.mark.parametrize("sentence", RUNS)
def test_each_made_up_run_gets_its_verdict_and_nothing_else_is_found(make, sentence):
    found = judge(read_facts(make(RUNS[sentence], manifest=CLASSES)))
    assert [x.sentence for x in found] == [sentence]
    assert found[0].is_good == sentence.startswith("healthy")
    for text in (found[0].evidence, found[0].next_step):
        assert text.endswith(".")


def test_a_run_of_some_seconds_has_one_verdict_on_its_loss_and_none_on_its_times(make):
    fields = {"step_seconds": 0.01, "data_wait_seconds": 0.005}
    folder = make(train(loss=lambda step: 2.3 - step / 1000, **fields) + evaluations(loss=rising))
    found = [x.sentence for x in judge(read_facts(folder))]
    assert found == ["overfitting since step 300", "too short to judge its times"]
    (found,) = judge(read_facts(make(train(step_seconds=0.01) + evaluations())))
    assert found.sentence == "too short to tell"
    assert "10 s of steps" in found.evidence


def test_what_is_graver_comes_first(make):
    full = {"peak_memory_bytes": 74 * GIB, "memory_limit_bytes": 75 * GIB}
    records = train(loss=lambda x: falling(x) if x < 900 else None, data_wait_seconds=0.05, **full)
    found = [x.sentence.partition(":")[0] for x in judge(read_facts(make(records)))]
    assert found == ["diverging", "memory is nearly full", "bound by input"]


@pytest.mark.parametrize("scale, expected", [(1024.0, "healthy"), (None, "3 steps were skipped")])
def test_a_loss_scale_may_skip_a_few_steps(make, scale, expected):
    records = train(skipped=3.0, **({"loss_scale": scale} if scale else {}))
    assert judge(read_facts(make(records)))[0].sentence == expected


def test_a_language_model_that_guesses_is_at_chance(make):
    folder = make(train(loss=lambda step: 5.54) + evaluations(loss=lambda step: 5.53))
    (folder / "config.yaml").write_text("model: {kwargs: {vocab_size: 256}}\n")
    records = [x for x in judge(read_facts(folder)) if x.sentence.startswith("at chance")]
    assert records[0].sentence == "at chance: loss 5.53 is no better than guessing among 256 tokens"


def test_a_run_that_waits_an_hour_for_its_next_start_says_what_failures_cost(make):
    found = judge(read_facts(make(run(), events_of((0, 500), (400, 1000)))))[0]
    assert found.sentence == "failures cost 97% of the time"
    assert "lost 100 steps" in found.evidence
    assert "checkpoint.every_steps" in found.next_step


def test_a_run_that_an_exception_ended_says_so_first(make):
    failed = {"time": "2026-01-01T01:00:00", "kind": "failed", "text": "", "error": "E: no shard"}
    log = f"{events_of((0, 500))}{json.dumps(failed)}\n"
    found = judge(read_facts(make(train(500) + evaluations(500), log)))[0]
    assert found.sentence == "ended by an error after step 500 of 1,000"
    assert found.evidence == "E: no shard"
    assert found.next_step.startswith("Fix the cause; start it again.")
