"""Runs are compared by their records, over seeds, and settings that differ are named."""

import json

import pytest

from jddp.ground.errors import ConfigError, UsageError
from jddp.workbench.compare import compare_runs, find_runs, main, read_runs


def compare(paths, *options):
    return compare_runs(read_runs(paths), *options)


RATES = {"a": 0.001, "b": 0.003}


@pytest.fixture
def make(tmp_path):
    """Makes a run: its evaluations by step, the time of a step, and its config."""

    def make(name, values, seconds=0.1, metric="accuracy", rate=None, seed=0, **others):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        lines = [{"step": 1, "split": "train", "loss": 1.0, "step_seconds": seconds}]
        lines += [
            {"step": step, "split": "eval", metric: value, "examples": 10}
            for step, value in enumerate(values, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + '{"step": 9, "split": "ev')
        if rate is not None:
            about = {"run": {"dir": str(folder)}, "optimizer": {"learning_rate": rate}}
            (folder / "config.yaml").write_text(json.dumps({"seed": seed, **about, **others}))
        return folder

    return make


def of_seeds(make, name, values, **options):
    return [
        make(f"{name}{seed}", [value], seed=seed, rate=RATES[name], **options)
        for seed, value in enumerate(values)
    ]


def test_the_better_of_two_configs_is_named_with_its_error_over_seeds_its_time_and_its_keys(make):
    runs = [
        *of_seeds(make, "a", [0.900, 0.904, 0.902]),
        *of_seeds(make, "b", [0.910, 0.914, 0.912], seconds=0.108),
    ]
    found = compare(runs)
    b, a = found.groups
    assert (found.metric, found.mode) == ("accuracy", "max")
    assert [x.path for x in b.results] == [str(x) for x in runs[3:]]
    assert (b.name, a.name) == ("b* (3 seeds)", "a* (3 seeds)")
    better = f"{b.name} is better than {a.name} by 0.01 +- 0.0016 accuracy"
    for words in (better, "1.08 times as long", "differ in optimizer.learning_rate"):
        assert words in found.verdict


def test_what_chance_may_have_made_is_not_called_better(make):
    runs = [*of_seeds(make, "a", [0.90, 0.92]), *of_seeds(make, "b", [0.91, 0.92])]
    assert "equal within their spread: they differ by 0.005 +- 0.011" in compare(runs).verdict
    assert "one seed does not show" in compare([runs[0], runs[2]]).verdict


OTHERS = [
    ({"train": {"num_steps": 5}}, {"train": {"num_steps": 60}}, "train.num_steps"),
    ({"data": {"dir": "a"}}, {"data": {"dir": "b"}}, "data.dir"),
    ({"callbacks": [{"name": "early_stopping"}]}, {}, "callbacks"),
]


@pytest.mark.parametrize("one, other, key", OTHERS)
def test_runs_of_other_lengths_or_data_are_no_seeds_of_one_setting(make, one, other, key):
    a, b = make("a", [0.9], rate=0.1, **one), make("b", [0.8], rate=0.1, seed=1, **other)
    found = compare([a, b])
    assert [len(x.results) for x in found.groups] == [1, 1]
    assert f"They differ in {key}." in found.verdict
    same = make("c", [0.8], rate=0.1, seed=1, report={"sinks": ["wandb"]}, **one)
    assert len(compare([a, same]).groups) == 1


def test_data_are_told_apart_by_their_digest_and_not_by_their_folder(make):
    places = [{"dir": "a"}, {"dir": "moved"}, {"dir": "a"}]
    runs = [make(f"r{i}", [0.9], rate=0.1, seed=i, data=x) for i, x in enumerate(places)]
    for run, digests in zip(runs, (["one"], ["old", "one"], ["another"]), strict=True):
        first, *later = [{"data": {"sha256": digest}} for digest in digests]
        first |= {"later_starts": later} if later else {}
        (run / "manifest.json").write_text(json.dumps(first))
    found = compare(runs)
    assert [len(x.results) for x in found.groups] == [2, 1]
    assert found.as_json()["differing"] == ["data.sha256"]
    (runs[0] / "manifest.json").write_text("{")  # damaged: as if it had none
    assert len(compare(runs[:2]).groups) == 2


def test_groups_and_runs_are_named_by_what_they_have_in_common_and_a_seed_counts_once(make):
    runs = [make(f"x/seed={seed},x=1", [0.9], seed=seed, rate=0.1) for seed in (8, 9)]
    runs.append(make("y/seed=9", [0.8], seed=9, rate=0.1))
    (group,) = compare(runs).groups
    assert [x.name for x in group.results] == ["x/seed=8,x=1", "x/seed=9,x=1", "y/seed=9"]
    assert (group.values, group.name) == ((0.9, 0.8), "* (2 seeds)")
    assert compare(runs[:2]).groups[0].name == "seed=*,x=1 (2 seeds)"
    assert compare(runs[:1]).groups[0].name == str(runs[0])


def test_a_smaller_loss_is_better_by_which_language_models_are_compared(make):
    worse, better = make("worse", [1.0, 0.9], metric="loss"), make("c", [0.8, None], metric="loss")
    found = compare([worse, better, make("broken", [])])  # before its first evaluation
    assert (found.mode, found.groups[0].results[0].path) == ("min", str(better))
    assert (found.groups[0].results[0].step, found.groups[0].results[0].last) == (1, 0.8)
    assert compare([better]).verdict.startswith("loss is 0.8: ")
    for run, loss in ((worse, 3.1), (better, 2.9)):
        line = {"step": 2, "split": "eval", "loss": loss, "accuracy": 0.5, "perplexity": 20.0}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert compare([worse, better]).metric == "loss"
    assert "equal: accuracy is 0.5" in compare([worse, better], "accuracy").verdict


def test_what_cannot_be_compared_is_refused(make, tmp_path):
    run, other = make("run", [0.5], metric="oddness"), make("other", [0.9])
    for options, error, message in (
        (([run], "auc"), UsageError, "auc"),
        (([run],), UsageError, "--metric"),
        (([run, other],), UsageError, r"run \(oddness\), other \(accuracy\)"),
        (([run], "oddness"), ConfigError, "--mode"),
    ):
        with pytest.raises(error, match=message):
            compare(*options)
    assert compare([run], "oddness", "min").groups[0].mean == 0.5
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty"):
        find_runs([tmp_path / "empty"])


def test_the_command_prints_a_table_of_a_folder_of_runs_or_json(make, tmp_path, capsys):
    of_seeds(make, "a", [0.92, 0.9])
    of_seeds(make, "b", [0.8])
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    lines = lines[lines.index("") - 1 :]
    assert lines[3].split() == ["a0", "0.92", "1", "0.92", "0.1"]
    assert main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["differing"] == ["optimizer.learning_rate"]
    assert [group["mean"] for group in told["groups"]] == [0.91, 0.8]
    assert main([str(tmp_path / "none")]) == 2
