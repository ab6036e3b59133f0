"""The site of docs/: what is made from the code is complete, and what is written agrees with it."""

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys

import optax
import pytest
import yaml
from runs import ROOT, compiling_as_here, environment
from tiny import MLP, loss_fn, make_batch

import jddp
import jddp.data
from jddp.__main__ import SHARED
from jddp.config.files import flatten
from jddp.config.keys import is_at, keys_of
from jddp.distributed.launcher import DETERMINISTIC
from jddp.engine.strategy import REFUSED
from jddp.ground.errors import ExitCode

STAGE = runpy.run_path(str(ROOT / "docs" / "stage.py"))
READ = re.compile(r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Za-z_]+)"|\b(JDDP_[A-Z_]+)\b')


OF_DATA = [
    f"data.{name}"
    for name, found in vars(jddp.data).items()
    if name[0] != "_" and not inspect.ismodule(found)
]
PUBLIC = sorted([*jddp.__all__, *OF_DATA])


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_every_public_name_has_a_page_in_one_group():
    grouped = [name for group in STAGE["API"].values() for name in group]
    assert sorted(grouped) == PUBLIC


def test_every_key_of_a_config_has_its_type_default_and_effect():
    made = STAGE["config_keys"]()
    for path, field in keys_of(jddp.Config).items():
        name = re.escape(".".join(path))
        about = re.escape(field.description.replace("<", "&lt;"))
        facts = r"[A-Z`].+ Default: `.*`\. May change when a run resumes: (?:yes|no)"
        assert re.search(rf"^\[`{name}`\]{{#.+}}\n: {about}\\\n  {facts}", made, re.M)


def test_every_exit_code_is_in_the_table_and_restarted_as_the_launcher_does_it():
    row = r'^\| <a id="exit-(\d+)"></a>(\d+) \| `(\w+)` \| .+? \| (.*?) ?\| .+ \|$'
    rows = re.findall(row, page("exit_codes"), re.M)
    assert [row[:3] for row in rows] == [(str(int(x)), str(int(x)), x.name) for x in ExitCode]
    restarted = {int(code): answer for code, _, _, answer in rows}
    assert {code for code, answer in restarted.items() if answer == "no"} == {*DETERMINISTIC, 75}
    others = restarted.keys() - {*DETERMINISTIC, 0, 75, 81}  # 81 is as the first failure's code
    assert all(restarted[code].startswith("yes") for code in others)


def test_every_variable_that_is_read_is_in_a_page():
    code = "\n".join(path.read_text() for path in ROOT.glob("jddp/**/*.py"))
    names = {name for pair in READ.findall(code) for name in pair if name}
    named = set(re.findall(r"`(\w+)`", page("environment")))
    assert names
    assert not names - named


def test_every_field_of_the_files_of_a_run_is_in_the_page(tmp_path):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, max_grad_norm=1.0, skip_nonfinite=True)
    batch = make_batch(16)
    options = {"evaluate": [batch], "run_dir": tmp_path, "log_every_steps": 1}
    jddp.fit(ddp, [batch] * 2, num_steps=2, learning_rate=lambda step: 0.1, **options)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    described = page("run_directory")
    named = set(re.findall(r"`(\w+)`", described))
    for name in re.findall(r"^\| `([\w.]+)` \|", described, re.M)[1:3]:
        assert (tmp_path / name).exists()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    fields = [set(json.loads(line)) for line in lines]
    fields.append(set(json.loads((tmp_path / "manifest.json").read_text())))
    fields.append(set(json.loads((folder / "run.json").read_text())))
    arrays = json.loads((folder / "arrays.json").read_text())
    fields += [set(about) for about in arrays.values()]
    assert not set.union(*fields) - named - {"accuracy"}


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    texts = []
    for path in ROOT.glob("jddp/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(" ".join(node.value.split()))
    messages = re.findall(r"^```text\n(.+)\n```", page("troubleshooting"), re.M)
    assert len(messages) >= 30
    parts = [part.strip() for message in messages for part in message.split("...")]
    assert not [part for part in parts if not any(part in text for text in texts)]
    anchors = re.findall(r'^<a id="([\w-]+)"></a>\n\n### ', page("troubleshooting"), re.M)
    assert len(set(anchors)) == len(anchors) == page("troubleshooting").count("\n### ")


def run_page(name, which, folder):
    """Runs the Python blocks of a page that `which` accepts, joined; returns what they print."""
    blocks = re.findall(r"^```python\n(.*?)^```", page(name), re.M | re.S)
    program = "\n".join(block for block in blocks if which(block))
    assert program
    options = {"cwd": folder, "env": environment(**compiling_as_here()), "text": True}
    shown = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)
    assert shown.returncode == 0
    return shown.stdout


MODES = ("zero", "fsdp", "compression", "local_sgd", "bitwise", "loss_scale")  # a page each
MODELS = ("models", "losses", "fine_tuning")
GUIDES = ("howto", "questions")
COMPILED = [pytest.param(x, marks=pytest.mark.slow) for x in (*GUIDES, *MODELS, *MODES)]


@pytest.mark.parametrize("name", ["data", "launch", *COMPILED])
def test_the_python_blocks_of_a_page_run_and_print_what_it_shows(name, tmp_path):
    printed = run_page(name, lambda block: True, tmp_path)
    shown = re.findall(r"^```text\n(.*?)^```", page(name), re.M | re.S)
    assert not [x for block in shown for x in block.splitlines() if x not in printed]


def test_the_page_on_modes_leads_to_each_and_has_the_pairs_that_are_refused():
    shown = page("modes")
    assert all(f"]({name}.md)" in shown for name in MODES)
    part = shown.partition("## What can be combined")[2]
    rows = re.findall(r"^\| `?([a-z][^|`]*)`? \| `?([a-z][^|`]*)`? \| (.+) \|$", part, re.M)
    assert {(one, other): why for one, other, why in rows} == REFUSED


def test_python_blocks_that_no_test_runs_are_in_one_page():
    """It quotes the code, which a test compares."""
    pages = {path.stem for path in ROOT.glob("docs/**/*.md") if "```python" in path.read_text()}
    pages -= {"python"}  # See test_docs.py.
    run = {"pytorch", "jax", "data", "launch", "tutorial", "sweeps", *GUIDES, *MODELS, *MODES}
    assert pages - run == {"life_of_a_gradient"}


def accuracy(printed):
    return float(re.findall(r"accuracy (0\.\d+)", printed)[-1])


@pytest.mark.slow
def test_the_program_and_the_config_of_the_tutorial_run(tmp_path):
    def is_module(block):
        return block.startswith("# my_job.py\n")

    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```", page("tutorial"), re.M | re.S)
    (module,) = (text for _, text in blocks if is_module(text))
    (config,) = (text for language, text in blocks if language == "yaml")
    (tmp_path / "my_job.py").write_text(module)
    (tmp_path / "my.yaml").write_text(config)
    printed = run_page("tutorial", lambda block: not is_module(block), tmp_path)
    assert "SIGINT: saved step" in printed
    assert "resumed from step" in printed
    assert accuracy(printed) > 0.8
    command = [sys.executable, "-m", "jddp.train", "--config", "my.yaml", "train.num_steps=3"]
    subprocess.run(command, cwd=tmp_path, env=environment(**compiling_as_here()), check=True)


@pytest.mark.slow
def test_the_program_of_the_page_on_sweeps_runs_its_trials(tmp_path):
    job = {"model": {"name": "mlp"}, "mesh": {"num_devices": 2}, "train": {"num_steps": 4}}
    (tmp_path / "a.yaml").write_text(json.dumps(job | {"data": {"global_batch_size": 1000}}))
    printed = run_page("sweeps", lambda block: True, tmp_path)
    assert "{'learning_rate': 0." in printed
    (study,) = (tmp_path / "runs" / "a").iterdir()
    assert len([*study.iterdir()]) == 10


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
KEYS = keys_of(jddp.Config)


def shell_lines(text):
    """The commands of a page, one a line, without prompts, comments and output."""
    for kind, block in re.findall(r"^```(bash|console)\n(.*?)^```", text, re.M | re.S):
        lines = block.replace("\\\n", " ").splitlines()
        lines = [x[2:] for x in lines if x.startswith("$ ")] if kind == "console" else lines
        yield from (re.sub(r"(^| +)#.*", "", line) for line in lines)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_options_keys_and_files_of_shell_lines_are_there(path):
    wrong = []
    shared = "\n".join(x.read_text() for x in ROOT.glob("jddp/config/*.py"))
    homes = [ROOT / "jddp" / "commands", ROOT / "jddp" / "workbench"]
    for line in shell_lines(path.read_text()):
        files = re.findall(r"(?<![\w/.])(?:scripts|benchmarks|examples|configs)/[\w./]+", line)
        wrong += [file for file in files if not (ROOT / file).exists()]
        for part in re.split(r"&&|\|\|?|;|\bsrun\b|\$\(", line):
            for command in re.split(r"(?:python3?|--| ) ?-m (?=jddp)|\bjddp (?=[a-z])", part)[1:]:
                name, *words = re.sub(r"'| \S+\.py .*", " ", command).split()
                name = name.removeprefix("jddp.")
                paths = (home / f"{SHARED.get(name, name)}.py" for home in homes)
                code = next((path for path in paths if path.exists()), None)
                known = code.read_text() + shared if code is not None else ""
                if "jddp.commands.training" in known:
                    known += (homes[0] / "training.py").read_text()
                wrong += [name] * (not known)
                options = [x.partition("=")[0] for x in words if x.startswith("--")]
                wrong += [x for x in options if known and f'"{x}"' not in known]
                given = [x.partition("=")[0] for x in words if re.match(r"[a-z_]+(\.\w+)*=", x)]
                wrong += [x for x in given if not is_known(tuple(x.split(".")))]
    assert not wrong


def is_known(place):
    return any(is_at(key, place) or is_at(place, key) for key in KEYS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_yaml_of_pages_parses_and_names_keys_that_are_there(path):
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.M | re.S):
        for values in yaml.safe_load_all(block):
            if set(values) <= set(jddp.Config.model_fields):  # else it is of Kubernetes or Ray
                assert all(is_known(tuple(key.split("."))) for key in flatten(values))


@pytest.mark.slow
def test_the_program_of_the_page_on_pytorch_runs_and_those_on_plain_jax_end_alike(tmp_path):
    assert accuracy(run_page("pytorch", lambda block: "torch" not in block, tmp_path)) > 0.9
    words = ("jax.pmap", "NamedSharding(", "import jddp")
    of_all = "def make_data"  # the block with which each program begins
    printed = [
        run_page("jax", lambda block, x=x: x in block or of_all in block, tmp_path) for x in words
    ]
    losses = [float(re.search(r"loss (0\.\d+)", text)[1]) for text in printed]
    assert max(losses) - min(losses) < 1e-3  # after 160 steps, with sums in another order
    assert min(map(accuracy, printed)) > 0.9
