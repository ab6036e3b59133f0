import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from runs import ROOT, contents, of_job, records, run_python

from jddp.__main__ import COMMANDS
from jddp.commands.train import main
from jddp.config.files import load_config
from jddp.config.schema import Config

CONFIG = """
train: {num_steps: 8, log_every_steps: 1, eval_every_steps: 4}
data: {target: "mine:points", global_batch_size: 8}
model: {target: "mine:Line"}
loss: {name: mean_squared_error}
optimizer: {name: sgd, learning_rate: 0.1}
mesh: {num_devices: 2}
checkpoint: {every_steps: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder, with a module and a config."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(ROOT / "tests" / "workers" / "mine.py", folder)
    (folder / "line.yaml").write_text(CONFIG)
    return folder


COMMAND = ["-m", "jddp.train", "--config", "line.yaml"]


def run_here(folder, *arguments, **variables):
    variables["XDG_CACHE_HOME"] = str(folder / "cache")
    return run_python(*arguments, folder=folder, **variables)


@pytest.fixture(scope="module")
def trained(folder):
    """A run from beginning to end, and what the command said."""
    done = run_here(folder, *COMMAND)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "line", done


@pytest.fixture
def here(folder, monkeypatch, tmp_path):
    """Calls the command line inside this process, in the user's folder."""
    assert jax.device_count() == 8  # JAX runs: a config can no longer change the devices there are.
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    yield lambda *arguments: main(["--config", "line.yaml", *arguments])
    sys.modules.pop("mine", None)


def test_a_run_says_what_it_does_and_keeps_what_it_measured(trained):
    run_dir, done = trained
    lines = done.stdout.splitlines()
    assert f"jax {jax.__version__} | 1 process x 2 cpu devices" in lines[0]
    model = "model    mine:Line, 7 parameters"
    sections = {"config   line", "data     mine:points: 20 train / 7 test examples", model}
    assert sections | {"run dir  runs/line"} <= set(lines)
    end = next(i for i, line in enumerate(lines) if line.startswith("done     8 steps, "))
    assert lines[end - 2].startswith("eval 8  loss ")
    assert re.fullmatch(r"median .* ex/s, .* .?FLOP/s", lines[end - 1])
    assert re.search(r"best loss [\d.]+ at step [48]$", lines[end])
    assert "for 8 of 8 steps" in (run_dir / "report.html").read_text()
    assert lines[end + 1] == "page     runs/line/report.html"
    named = re.findall("jddp ([a-z]+) runs/line", " ".join(lines[end + 1 :]))
    assert named
    assert set(named) <= COMMANDS.keys()
    assert len(lines[end:]) <= 4
    assert all(len(line) <= 80 for line in lines)
    steps = [(record["step"], record["split"]) for record in records(run_dir)]
    train = [(step, "train") for step in range(1, 9)]
    assert steps == [*train[:4], (4, "eval"), *train[4:], (8, "eval")]
    assert {"loss", "learning_rate", "count"} <= records(run_dir)[0].keys()
    assert records(run_dir)[-1]["examples"] == 7
    assert load_config([str(run_dir / "config.yaml")])[0].run.dir == "runs/line"
    assert (run_dir.parents[1] / "cache" / "jddp" / "xla").is_dir()


def test_a_finished_run_is_not_run_again_and_another_config_is_refused(here, trained, capsys):
    before = contents(trained[0])
    assert here() == 0
    assert "finished at step 8; nothing to do" in capsys.readouterr().out
    assert contents(trained[0]) == before
    assert here("optimizer.learning_rate=0.2", "seed=1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jddp: run.dir runs/line holds a run of another config: ")
    assert "seed is 0 there, 1 here" in line
    assert "optimizer.learning_rate is 0.1 there, 0.2 here" in line
    assert contents(trained[0]) == before
    assert here("checkpoint.resume=never") == 2
    assert "Choose another run.dir" in capsys.readouterr().err
    (trained[0] / "logs" / "failure.json").unlink()  # of the run that began
    assert contents(trained[0]) == before


MISTAKES = [
    (["--confg", "x"], 2, "unrecognized arguments: --confg. Did you mean '--config'? See jddp"),
    (["--zzz"], 2, "unrecognized arguments: --zzz. See jddp train --help."),
    (["gpt_stdlib"], 2, "'gpt_stdlib': not of the form key.path=value. Did you mean '--config g"),
    (["nowhere"], 2, "'nowhere': not of the form key.path=value, e.g. train.num_steps=100"),
    (["--config"], 2, "expected one argument"),
    (["--config", "nowhere.yaml"], 2, "--config nowhere.yaml: no such file or preset."),
    (["data.global_batch_size=1000"], 65, "examples, but one global batch needs 1000"),
    (["model.init_from=no.safetensors"], 2, "model.init_from: no.safetensors does not exist"),
    (["model.init_from=nowhere", "--dry-run"], 2, "model.init_from: nowhere does not exist"),
    (["--target", "h100"], 2, "--target needs --dry-run: a job trains on the devices at hand."),
    (["model.target=mine:Lien"], 2, "module 'mine' has no 'Lien'. Did you mean 'Line'?"),
    (["data.kwargs.num_broken_rows=1"], 65, "array 'y' holds NaN or infinity"),
    (["optimizer.learning_rate=1e30", "run.dir=runs/nan"], 80, "The loss is "),
    (["loss.name=cross_entropy", "run.dir=runs/loss"], 2, "the batch holds x, y: 'label' is"),
    (["train.eval_params=ema", "run.dir=runs/ema"], 2, "needs ema_decay= (ddp.ema_decay)"),
]


@pytest.mark.parametrize("arguments, code, message", MISTAKES)
def test_each_mistake_is_one_line_and_a_code_of_its_own(here, capsys, arguments, code, message):
    assert here(*arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jddp: ")
    assert message in line


def test_a_bug_keeps_its_traceback(here, capsys):
    assert here("data.kwargs.num_broken_rows=x", "run.dir=runs/bug") == 1
    assert "Traceback" in (said := capsys.readouterr().err)
    assert "TypeError: slice indices" in said


def test_a_dry_run_writes_nothing_and_fits_a_terminal(here, folder, capsys, monkeypatch):
    before, preallocate = contents(folder), "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(preallocate, "")  # so that it is as before in the end
    monkeypatch.delenv(preallocate)
    assert here("--dry-run", "run.dir=runs/dry") == 0
    assert os.environ[preallocate] == "false"  # a job may need the memory
    out = capsys.readouterr().out
    assert "memory per device, MiB" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    new = contents(folder).keys() - before.keys()
    assert {path for path in new if "__pycache__" not in path.parts} == set()


def test_the_printed_config_is_the_one_that_runs(here, tmp_path, capsys):
    assert here("--print-config", "seed=3", "optimizer.kwargs.momentum=1e-1") == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    config, _ = load_config([str(printed)])
    found = config.seed, config.optimizer.kwargs, config.run.dir
    assert found == (3, {"momentum": 0.1}, "runs/line")


def test_help_fits_a_screen_and_names_every_section_and_key(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 24
    assert all(section in said for section in Config.model_fields)
    assert main(["--help-keys"]) == 0
    assert "optimizer.schedule.name = cosine_decay_schedule\n" in capsys.readouterr().out


LIGHT = """
import sys
from jddp.__main__ import COMMANDS
from jddp.commands.train import main
for arguments in (["sede=3"], ["--print-config"], ["--help-keys"], ["run.dir=in_the_way/run"]):
    code = main(["--config", "line.yaml", *arguments])
sys.exit(", ".join({"jax", "numpy", "flax", "optax", "rich"} & sys.modules.keys()) or code)
"""


def test_nothing_heavy_is_imported_before_arguments_and_run_directory_are_right(folder):
    (folder / "in_the_way").write_text("")
    done = run_here(folder, "-c", LIGHT)
    assert done.returncode == 74, done.stderr
    assert "jddp: run.dir in_the_way/run: Not a directory" in done.stderr.splitlines()[-1]


@pytest.mark.processes
def test_processes_that_read_different_data_say_so_and_end(folder):
    command = [*COMMAND, "data.target=mine:points_of_each_process", "run.dir=runs/differ"]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda job: run_here(folder, *command, **job), of_job()):
            assert done.returncode == 78, done.stderr
            assert "process 1 has another data set than process 0: sha256 is " in done.stderr
            assert "Traceback" not in done.stderr
    assert not (folder / "runs" / "differ").exists()
