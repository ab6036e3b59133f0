import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from runs import ROOT, calling, printed, refused
from states import assert_same, close
from sweeps import swept

import jddp
from jddp.commands.summary import closing, memory_table, opening, preview
from jddp.config.files import dump_values, load_config, read_stored, read_yaml
from jddp.config.keys import keys_of
from jddp.config.options import BatchNormConfig, PrecisionConfig, ReductionConfig, StrategyConfig
from jddp.config.schema import Config, effect_of
from jddp.distributed.watchdog import Limits
from jddp.ground.errors import ConfigError, DataError, FileSystemError, UsageError
from jddp.trainer.job.build import _facts, build, train
from jddp.trainer.job.parts import optimizer_of
from jddp.trainer.reports.run_directory import compare_keys
from jddp.trainer.runs.opened import open_run
from jddp.zoo.models import make_model

MINE = (ROOT / "tests" / "workers" / "mine.py").read_text()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's own module in the current directory."""
    assert jax.device_count() == 8  # JAX runs: a config can no longer change the devices there are.
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


def hook(**values):
    return {"reduction": {"hook": values}}


def own(name, **kwargs):
    return {"target": f"mine:{name}", "kwargs": kwargs}


def own_config(**changes):
    sections = {
        "train": {"num_steps": 3, "log_every_steps": 1},
        "run": {"dir": "run"},
        "data": {**own("points", slope=3.0), "global_batch_size": 8},
        "model": own("Line"),
        "loss": own("absolute_error", power=2),
        "optimizer": own("plain_sgd", momentum=0.5),
        "mesh": {"num_devices": 2},
    }
    return Config(**{**sections, **changes})


X = np.linspace(-1, 1, 40, dtype=np.float32).reshape(-1, 2)  # of `points`
OF_EACH = {"batch_norm": "local", "ema_decay": 0.5}
GIVEN_BACK = [("Line", {}, "params"), ("LineNnx", {}, "params"), ("Line", OF_EACH, "ema")]


@pytest.mark.parametrize(
    "name, ddp, params", swept(GIVEN_BACK, every=2), ids=["linen", "nnx", "averages"]
)
def test_ones_own_data_model_loss_and_optimizer_are_trained_and_given_back(mine, name, ddp, params):
    changes = {"model": {"target": f"mine:{name}"}, "ddp": ddp}
    length = {"num_steps": 3, "log_every_steps": 1, "eval_params": params}
    run = train(own_config(train=length, **changes), **{"optimizer.learning_rate": 0.05})
    assert run.step == 3
    assert run.metrics["learning_rate"] == pytest.approx(0.0125)  # cosine, after 2 of 3 steps
    assert run.eval_metrics["examples"] == 7
    # Of test examples of which the slope is 3.
    losses = (np.asarray(open_run("run", trust="package").model(X[:7])) - 3 * X[:7, :1]) ** 2
    assert run.eval_metrics["loss"] == pytest.approx(losses.mean(), rel=1e-5)


POWERSGD = {"name": "powersgd", "kwargs": {"rank": 1, "start_step": 1}}
HOOKS = [({}, ""), ({"name": "mean"}, ""), (POWERSGD, "powersgd"), (own("scale"), "scaled")]


@pytest.mark.parametrize(
    "values, name", swept(HOOKS, every=2), ids=["default", "mean", "powersgd", "custom"]
)
def test_the_hook_of_a_config_reduces_its_gradients(mine, values, name):
    job = build(own_config(ddp=hook(**values)))
    assert job.ddp.steps.spec.reducer.hook_name == name
    job.run()


def test_epochs_become_steps_of_all_examples_and_a_run_without_a_directory_leaves_nothing(mine):
    steps, before = [], set(Path().iterdir())
    count = calling(on_step=lambda run, metrics: steps.append(metrics["step"]))
    data = {"target": "mine:points", "global_batch_size": 12}
    run = train(own_config(train={"num_epochs": 2}, run={}, data=data), callbacks=[count])
    assert steps == [1, 2, 3, 4]  # of 12 and 8 examples in turn
    assert (run.step, run.metrics["count"]) == (4, 4)
    assert {path for path in Path().iterdir() if path.name != "__pycache__"} == before


def test_a_config_evaluates_records_and_saves_by_epoch(mine):
    length = {"num_epochs": 2, "eval_every_epochs": 0.5}
    data = {"target": "mine:points", "global_batch_size": 6}
    run = train(own_config(train=length, data=data, checkpoint={"every_epochs": 1}))
    # Halves of 20 examples, six a step, end with steps 2, 4, 5 and 7.
    assert [record["step"] for record in run.evaluations] == [2, 4, 5, 7]
    assert {path.name for path in Path("run/checkpoints").iterdir()} == {"4", "7"}
    again = build(load_config(["run/config.yaml"], [])[0])
    assert "checkpoints every epoch" in opening(again, "again", "", columns=80)
    assert "jddp predict run --data FILE --out FILE" in closing(again, run, columns=80)


def test_checkpoints_stay_as_the_config_says_and_say_with_the_manifest_what_a_run_was(mine, capsys):
    section = {"every_steps": 1, "keep": 1, "keep_every_steps": 2, "best_metric": "loss"}
    length = {"num_steps": 5, "eval_every_steps": 1}
    run = train(own_config(train=length, checkpoint=section, seed=3))
    assert {path.name for path in Path("run/checkpoints").iterdir()} == {"2", "4", "5"}
    best = min(run.evaluations, key=lambda record: record["loss"])
    assert [path.name for path in Path("run/best").iterdir()] == [str(best["step"])]
    assert f"best loss {best['loss']:.4g} at step {best['step']}" in printed(capsys)
    manifest = read_yaml(Path("run/manifest.json"))
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["data"]["description"].startswith("mine:points: 20 train / 7 test")
    assert manifest["world"] == {"num_processes": 1, "num_devices": 2, "device_kind": "cpu"}
    beside = json.loads(Path("run/checkpoints/5/run.json").read_text())
    assert (beside["config"]["seed"], beside["metrics"]["step"]) == (3, 5)
    assert beside["manifest"]["versions"]["jax"] == jax.__version__


def test_processes_compare_their_configs_flags_and_code_by_name(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    facts = _facts(own_config())
    assert (facts["XLA_FLAGS"], facts["seed"]) == ("--mine", "0")
    assert {"JAX_PLATFORMS", "code of jddp", "jax", "optimizer.learning_rate"} <= facts.keys()
    assert "data.dir" not in facts  # which may be another on each machine


def test_a_sink_of_a_config_is_made_for_its_run_and_gets_its_records(mine):
    for num_steps in (3, 5):  # a sink may be there later
        sinks = {"sinks": ["mine:Seen"]} if num_steps == 5 else {}
        train_steps = {"num_steps": num_steps, "log_every_steps": 1}
        run = train(own_config(report=sinks, train=train_steps))
    seen = sys.modules["mine"].Seen
    (start,) = seen.starts
    assert (start.run_dir, start.step) == (mine / "run", 3)
    assert start.config == run.config
    assert seen.records == [record for record in run.history if record["step"] > 3]
    with pytest.raises(ConfigError, match=r"report.sinks\[0\]: module 'mine' has no 'Sen'"):
        train(own_config(report={"sinks": ["mine:Sen"]}))


def test_all_that_cannot_be_resolved_is_said_at_once(mine):
    wrong = {"data": "fashion_mnits", "loss": "cros_entropy", "optimizer": "adamv"}
    sections = {section: {"name": name} for section, name in wrong.items()}
    with pytest.raises(ConfigError) as caught:
        build(own_config(model={"target": "mine:Lime"}, **sections))
    optimizer, data, model, loss = str(caught.value).splitlines()
    assert optimizer.startswith("optimizer.name: optax has no 'adamv'. Did you mean 'adam")
    assert model == "model.target: module 'mine' has no 'Lime'. Did you mean 'Line'?"
    assert loss.startswith("loss.name: no loss 'cros_entropy'. Did you mean 'cross_entropy'?")
    assert data.startswith("data.name: no data set 'fashion_mnits'. Did you mean 'fashion_mnist'?")


WRONG_TARGETS = [
    ("model", {"target": "mine.Line"}, "Did you mean 'mine:L"),
    ("model", {"target": "nowhere:Line"}, "cannot import 'nowhere': ModuleNotFoundError"),
    ("model", {"target": "broken:Line"}, "cannot import 'broken': ModuleNotFoundError: No mod"),
    ("model", own("raise_on_import"), "which cannot be called"),
    ("model", own("number"), "which is no Flax module"),
    ("model", own("Line", widht=1), "Did you mean 'width'?"),
    ("model", {"name": "cnm"}, "model.name: no model 'cnm'. Did you mean 'cnn"),
    ("data", own("number"), "data.target: mine:number returns int. It must"),
    ("data", own("points", slop=1), "Did you mean 'slope'?"),
    ("loss", own("absolute_error", powr=1), "Did you mean 'power'?"),
    ("optimizer", own("points"), "points gives tuple, no optimizer."),
    ("ddp", hook(name="powersg"), "Did you mean 'power"),
    ("ddp", hook(name="powersgd", kwargs={"rnk": 1}), "kwargs.rnk: powersgd takes"),
    ("ddp", hook(name="powersgd", kwargs={"rank": 0}), "powersgd: got rank=0"),
    ("ddp", hook(target="mine:number"), "mine:number returns int. It must return a"),
]


def test_a_target_that_is_wrong_is_one_clear_line(mine):
    for section, values, message in WRONG_TARGETS:
        with refused(ConfigError, re.escape(message)):
            build(own_config(**{section: values}))
    with pytest.raises(ConfigError, match=r"model\.kwargs\.dtype: 'bflot16'.*'bfloat16'"):
        make_model("cnn", kwargs={"dtype": "bflot16"})


def test_weights_of_a_file_say_how_often_an_example_is_read(mine):
    weights = np.zeros(20)
    weights[[3, 7]] = 1
    np.save("weights.npy", weights)
    data = {"target": "mine:points", "global_batch_size": 20, "sample_weights": "weights.npy"}
    x = build(own_config(data=data)).train_batches().batch(0)["x"]
    rows, counts = np.unique(x, axis=0, return_counts=True)
    np.testing.assert_array_equal(rows, X[[3, 7]])
    assert counts.tolist() == [10, 10]
    np.save("weights.npy", np.array(["a"] * 20))
    with pytest.raises(DataError, match=r"weights\.npy: weights are <U1"):
        build(own_config(data=data)).train_batches()


def test_a_run_directory_is_data_and_imports_nothing_without_trust(mine):
    train(own_config())
    sys.modules.pop("mine")
    with pytest.raises(UsageError, match=r"'mine:Line'.* is not imported.*trust=.*package"):
        open_run("run")
    assert "mine" not in sys.modules
    config = Path("run/config.yaml")
    text = config.read_text()
    config.write_text(text.replace("slope: 3.0", "slope: ${oc.env:HOME}"))
    assert open_run("run", trust="package").config["data"]["kwargs"]["slope"] == "${oc.env:HOME}"
    for target, trust in (("jddp.zoo.models:MODELS", None), ("mine:points", "package")):
        config.write_text(text.replace("mine:Line", target))
        with pytest.raises(UsageError, match="is no Flax module class"):
            open_run("run", trust=trust)
    config.write_text(text)
    shutil.rmtree("run/checkpoints/3")
    with pytest.raises(FileSystemError, match="run/checkpoints holds no finished checkpoint"):
        open_run("run", trust="package")


def test_a_summary_and_a_preview_say_what_a_run_would_be_and_write_nothing(mine):
    before = set(Path().iterdir())
    job = build(own_config(ddp={"accumulate_steps": 2}), needs_data=False)
    text, plan = opening(job, "mine", "", columns=80), preview(job)
    assert "\nbatch    8 = 2 devices x 2 micro-batches x 2 examples" in text
    assert "\nsteps    3 = 1.2 epochs of 20 examples" in text
    assert plan.startswith("1 bucket, ")
    assert "fits: " in plan
    odd = own_config(data={"target": "mine:points", "global_batch_size": 5})
    said = "batch    5 and 1 of padding = 2 devices x 3 examples"
    assert said in opening(build(odd, needs_data=False), "odd", "", columns=80)
    absent = {"name": "npy", "dir": "nowhere", "global_batch_size": 8}
    absent["kwargs"] = {"image_size": 8, "num_classes": 10}
    config = own_config(data=absent, model={"name": "cnn"}, loss={}, train={"num_epochs": 3})
    said = opening(build(config, needs_data=False), "absent", "", columns=40)
    assert "steps    unknown: the data is not on" in said
    assert all(len(line) <= 40 or "/" in line for line in said.splitlines())  # paths stay whole
    with pytest.raises(DataError):
        build(config)
    assert {path for path in Path().iterdir() if path.name != "__pycache__"} == before


def test_what_does_not_fit_comes_with_options_that_would(mine):
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    data = {"target": "mine:points", "global_batch_size": 32, "kwargs": {"num_examples": 64}}
    # An eighth of the host, which two devices share, for every row.
    loss = {"target": "mine:greedy", "kwargs": {"per_row": host // 8 // 4}}
    job = build(own_config(data=data, loss=loss))
    memory = jddp.memory(job.ddp, job.batch_spec)
    lines = memory_table(job, memory)
    assert lines[1].startswith("does not fit")
    assert lines[2].startswith("  accumulate_steps=")
    assert lines[3].startswith("  a global batch of ")
    tight = memory_table(job, dataclasses.replace(memory, limit=memory.fixed))
    assert "choose a smaller model" in tight[2]
    held = re.search(r"batch +([\d.]+)\n", lines[0])
    assert float(held[1]) == pytest.approx(4 * memory.batch / 2**20, abs=0.005)
    unknown = memory_table(job, dataclasses.replace(memory, limit=math.inf))
    assert unknown[1:] == ["the device does not report its memory: whether it fits is unknown"]


CYCLE = {"init_value": 0.0, "peak_value": 0.5, "warmup_steps": 2, "decay_steps": 10}
# What optax has no default for, and nothing can be filled in.
NEEDED = {
    "exponential_decay": {"decay_rate": 0.5},
    "linear_schedule": {"end_value": 0.0},
    "piecewise_constant_schedule": {"boundaries_and_scales": {10: 0.5}},
    "sgdr_schedule": {"cosine_kwargs": [CYCLE]},
}
SCHEDULES = sorted([*NEEDED, "cosine_decay_schedule", "warmup_cosine_decay_schedule"])


@pytest.mark.parametrize("name", swept(SCHEDULES, every=3))
def test_a_schedule_of_optax_works_from_a_config(name):
    schedule = {"name": name, "kwargs": NEEDED.get(name, {})}
    # As long as the warm-up and longer, and shorter than it.
    for warmup_steps, num_steps in itertools.product((0, 10), (40, 5)):
        values = {"learning_rate": 0.5, "warmup_steps": warmup_steps, "schedule": schedule}
        config = Config(train={"num_steps": num_steps}, optimizer=values)
        rates = np.asarray(jax.vmap(optimizer_of(config, num_steps)[1])(np.arange(num_steps)))
        assert np.isfinite(rates).all()
        assert rates.max() <= 0.5 + 1e-6
        assert num_steps < 40 or rates.max() == pytest.approx(0.5)
        assert not warmup_steps or rates[0] < 0.05


def test_a_warm_up_among_the_own_arguments_of_a_schedule_is_taken(mine):
    own = {"name": "warmup_cosine_decay_schedule", "kwargs": {"warmup_steps": 10}}
    config = own_config(train={"num_steps": 20}, optimizer={"learning_rate": 0.5, "schedule": own})
    rates = [optimizer_of(config, 20)[1](step) for step in (0, 10, 20)]
    np.testing.assert_allclose(rates, [0, 0.5, 0], atol=1e-7)


def of_steps(num_steps, run_dir="run", *, schedule="constant_schedule", train=(), **changes):
    schedule = {"name": schedule, "kwargs": changes.pop("kwargs", {})}
    optimizer = {"target": "mine:plain_sgd", "learning_rate": 0.05, "schedule": schedule}
    train = {"num_steps": num_steps, "log_every_steps": 1, **dict(train)}
    sections = {"train": train, "run": {"dir": run_dir}, "optimizer": optimizer}
    return own_config(**{**sections, **changes})


@pytest.mark.slow
def test_a_schedule_follows_the_length_of_a_run_or_is_kept_in_a_longer_one(mine, capsys):
    def cosine(num_steps, folder, **kwargs):
        run = train(of_steps(num_steps, folder, schedule="cosine_decay_schedule", kwargs=kwargs))
        return run.metrics["learning_rate"], printed(capsys)

    for folder in ("follows", "kept"):
        cosine(4, folder)
    rate, _ = cosine(8, "follows")
    assert rate == pytest.approx(0.0019, rel=0.01)
    with pytest.raises(ConfigError, match=r"alpha is absent there, 0\.0 here"):
        cosine(8, "kept", decay_steps=4, alpha=0.0)
    rate, reported = cosine(8, "kept", decay_steps=4)
    assert "optimizer.schedule.kwargs.decay_steps absent -> 4" in reported
    assert rate == 0
    with pytest.raises(ConfigError, match=r"decay_steps is 4 there, 5 here"):
        cosine(8, "kept", decay_steps=5)


@pytest.mark.parametrize("size", [20, 24])  # Two epochs of 24 are full batches.
def test_more_epochs_begin_with_the_example_behind_the_last_one(mine, size):
    def epochs(number):
        data = {**own("points", num_examples=size), "global_batch_size": 16}
        return build(own_config(train={"num_epochs": number}, data=data)).train_batches()

    first, second = epochs(1), epochs(2)
    batches = [*first]
    second.set_state(first.get_state())
    batches += second
    seen = [x["x"][x.get("mask", np.ones(16)) > 0, 0] for x in batches]
    np.testing.assert_array_equal(*np.sort(np.concatenate(seen).reshape(2, size)))
    assert len([*epochs(2)]) == 3  # the partial batch is in the middle of none


REDUCTION = {"bucket_mb": [8e-6, 1e-5], "layout": "flat", "overlap": True}


@pytest.mark.slow
def test_what_changes_roundings_alone_may_change_when_a_run_resumes(mine, capsys):
    optimizer = {"name": "sgd", "schedule": {"name": "constant_schedule"}}
    whole = train(own_config(run={"dir": "whole"}, train={"num_steps": 6}, optimizer=optimizer))
    train(own_config(optimizer=optimizer))
    later = {"ddp": {"reduction": REDUCTION}, "mesh": {"num_devices": 2, "axis_name": "batch"}}
    run = train(own_config(train={"num_steps": 6}, optimizer=optimizer, **later))
    reported = printed(capsys).partition("changed: ")[2]
    assert all(f"ddp.reduction.{name} " in reported for name in REDUCTION)
    assert "mesh.axis_name " in reported
    close(run.state.params, whole.state.params, atol=0)


def stopping(num_steps=6, **stop):
    train = {"num_steps": num_steps, "eval_every_steps": 1, "log_every_steps": 1}
    listed = [{"name": "early_stopping", "kwargs": stop}] if stop else []
    return own_config(train=train, checkpoint={"best_metric": "loss"}, callbacks=listed)


@pytest.mark.slow
def test_a_config_stops_a_run_early_and_a_run_that_is_given_more_patience_continues(mine, capsys):
    never_better = {"metric": "loss", "min_delta": 1e9}
    run = train(stopping(**never_better, patience=2))
    assert (run.step, run.stopped) == (3, "loss has not improved for 2 evaluations")
    assert f"stopped at step 3: {run.stopped}" in printed(capsys)
    run = train(stopping(**never_better, patience=4))
    assert (run.step, run.stopped) == (5, "loss has not improved for 4 evaluations")
    said = printed(capsys)
    assert "callbacks [" in said
    assert "early stopping has changed: the run it had stopped continues" in said
    run = train(stopping())
    assert (run.step, run.stopped) == (6, None)
    assert_same(run.state, train(stopping(), **{"run.dir": "whole"}).state)


EVALUATED = {"target": "mine:absolute_error", "eval_target": "mine:within"}


def test_a_config_evaluates_by_its_own_function_in_training_and_afterwards(mine):
    run = train(own_config(loss=EVALUATED))
    assert "close" in run.metrics
    assert "within" not in run.metrics
    assert "within" in run.eval_metrics
    assert jddp.open_run("run", trust="config").evaluate() == pytest.approx(run.evaluate())
    with pytest.raises(ConfigError, match="loss.eval_target: module 'mine' has no 'withn'"):
        build(own_config(loss={**EVALUATED, "eval_target": "mine:withn"}))


def test_code_that_evaluates_is_imported_only_where_it_is_trusted(mine):
    train(own_config(loss={"name": "mean_squared_error", "eval_target": "mine:within"}))
    key = "loss.eval_target 'mine:within', which the run directory names, is not imported"
    with pytest.raises(UsageError, match=key):
        open_run("run", model=None, trust="package").evaluate([{"x": X, "y": X[:, :1]}])
    assert "within" in open_run("run", trust="config").evaluate()
    # Another loss drops the function that was meant for the first one.
    other = open_run("run", trust="config", overrides=["loss.target=mine:absolute_error"])
    assert "close" in other.evaluate()


def test_the_config_of_a_run_may_have_keys_of_an_earlier_version(tmp_path, caplog):
    stored = own_config(checkpoint={"best_metric": "accuracy"}).model_dump()
    stored["checkpoint"] |= {"best_mode": "max", "keep_best": 1}
    stored["train"]["stop"] = {"metric": None, "patience": 3, "mode": "auto", "min_delta": 0.0}
    path = tmp_path / "config.yaml"
    path.write_text(dump_values(stored))
    assert read_stored(path) == own_config(checkpoint={"best_metric": "accuracy"})
    assert "checkpoint.best_mode=max is no key any more" in caplog.text
    refused, _ = compare_keys(read_yaml(path), read_stored(path).model_dump())
    assert refused == ["checkpoint.best_mode is max there, absent here"]
    with pytest.raises(ConfigError, match="unknown key 'checkpoint.best_mode'"):
        load_config([str(path)])


def test_what_may_change_is_what_the_docs_say():
    text = (ROOT / "docs" / "reliability.md").read_text()
    keys = {".".join(path) for path in keys_of(Config)}
    for effect in ("none", "result", "rounding"):
        (row,) = re.findall(rf"^\| {effect}: .*", text, re.M)
        listed = re.findall(r"`([\w.*]+)`", row)
        reported = {key for key in keys if any(fnmatch(key, pattern) for pattern in listed)}
        assert reported == {key for key in keys if effect_of(key) == effect}
    assert effect_of("optimizer.kwargs.b1") == effect_of("nothing") == "numbers"


def defaults_of_signature(function):
    return {name: x.default for name, x in inspect.signature(function).parameters.items()}


def test_a_default_is_the_same_in_a_config_and_in_a_call():
    config = Config(train={"num_steps": 1}).model_dump()
    ddp, own = config["ddp"], defaults_of_signature(jddp.DataParallel.__init__)
    words = {"strategy": StrategyConfig, "batch_norm": BatchNormConfig}
    words |= {"reduction": ReductionConfig, "precision": PrecisionConfig}
    empty = {"state": None, "frozen": ()}
    for name in ddp.keys() - words.keys():
        assert ddp[name] == own[name] or (not ddp[name] and own[name] == empty[name]), name
    for name, section in words.items():
        assert section.chosen(own[name], name).model_dump() == ddp[name]
    saving, length = config["checkpoint"], config["train"]
    own = defaults_of_signature(jddp.fit)
    same = {name: length[name] for name in ("log_every_steps", "eval_every_steps")}
    same |= {"seed": config["seed"], "resume": saving["resume"], "keep": saving["keep"]}
    assert {name: own[name] for name in same} == same
    assert own["save_every_steps"] == saving["every_steps"]
    assert jddp.Keep() == jddp.Keep(saving["keep"], saving["keep_every_steps"])
    limits = length["eval_params"], length["limit_eval_batches"]
    assert jddp.Evaluation(None) == jddp.Evaluation(None, *limits)
    assert own["checks"] == jddp.Checks(
        replicas_every_steps=length["check_replicas_every_steps"],
        replay_every_steps=length["replay_every_steps"],
        max_consecutive_skips=length["max_consecutive_skips"],
        on_spike=length["on_spike"],
        limits=Limits(),
    )


def test_a_changed_key_is_refused_until_it_is_allowed(mine, capsys):
    train(of_steps(2))
    rate = {"optimizer.learning_rate": 0.5}
    with pytest.raises(ConfigError, match=r"checkpoint.allow_changed=\[key\]"):
        train(of_steps(4), **rate)
    assert train(of_steps(3), **rate, **{"checkpoint.allow_changed": [*rate]}).step == 3
    assert "optimizer.learning_rate 0.05 -> 0.5" in printed(capsys)
    (later,) = json.loads(Path("run/manifest.json").read_text())["later_starts"]
    assert later["changed"] == ["train.num_steps 2 -> 3", "optimizer.learning_rate 0.05 -> 0.5"]
    assert train(of_steps(4), **rate).step == 4
    assert read_yaml(Path("run/config.yaml"))["optimizer"]["learning_rate"] == 0.5


def test_paths_of_a_config_are_those_of_its_start_whatever_its_parts_do(mine):
    np.save("weights.npy", np.ones(20))
    Path("other").mkdir()
    text = "import os\nfrom mine import points as of_mine\n\n"
    text += "def points():\n    os.chdir('other')\n    return of_mine()\n"
    (mine / "leaving.py").write_text(text)
    data = {"target": "leaving:points", "global_batch_size": 8, "sample_weights": "weights.npy"}
    run = train(of_steps(2, data=data))
    sys.modules.pop("leaving")
    assert (run.step, run.run_dir) == (2, mine / "run")
    assert {path.name for path in mine.glob("run/*")} >= {"checkpoints", "metrics.jsonl"}
    assert not any((mine / "other").iterdir())


@pytest.mark.slow
def test_an_edited_loss_is_another_program_under_the_same_config(mine, capsys):
    train(of_steps(2))
    (mine / "mine.py").write_text(MINE.replace("** power", "** (power + 1)"))
    del sys.modules["mine"]
    for num_steps in (2, 4):
        with pytest.raises(ConfigError, match=r"step 2 .*another loss.*checkpoint\.resume=changed"):
            train(of_steps(num_steps))
    assert train(of_steps(4), **{"checkpoint.resume": "changed"}).step == 4
    assert "another program: loss differs" in printed(capsys)
    # A key that is allowed to change is as good a reason, and so is the length of a schedule.
    longer = of_steps(5, checkpoint={"allow_changed": ["loss.kwargs.power"]})
    assert train(longer, **{"loss.kwargs.power": 3}).step == 5
    scheduled = {"schedule": "cosine_decay_schedule", "loss": {"target": "mine:absolute_error"}}
    for num_steps in (2, 4):
        assert train(of_steps(num_steps, "scheduled", **scheduled)).step == num_steps
    assert "another program" not in printed(capsys)


def test_a_dry_run_compiles_for_the_batches_of_the_run(mine):
    """Of 20 rows and 8 a step, the last batch of an epoch is partial, so that all have a mask."""
    for length, drops, is_masked in (
        ({"num_epochs": 1}, False, True),
        ({"num_epochs": 2}, False, False),
        ({"num_epochs": 1}, True, False),
        ({"num_steps": 3}, False, False),
    ):
        data = own("points") | {"global_batch_size": 8, "drop_remainder": drops}
        job = build(own_config(train=length, data=data))
        batch = next(iter(job.train_batches()))
        assert job.batch_spec.keys() == batch.keys()
        assert ("mask" in batch) == is_masked


def test_weights_of_a_config_are_in_the_first_state_or_refused_by_its_keys(mine):
    first = train(own_config())
    model = {"target": "mine:Line", "init_from": "run"}
    again = train(own_config(model=model, run={"dir": "again"}))
    assert again.eval_metrics["loss"] != first.eval_metrics["loss"]
    safetensors.numpy.save_file({"params/other": np.ones(3, np.float32)}, "other.safetensors")
    model["init_from"] = "other.safetensors"
    refusal = r"^model.init_from: other.safetensors does not fit .*model.weights_partial=true"
    with pytest.raises(ConfigError, match=refusal):
        train(own_config(model=model, run={"dir": "third"}))
