"""Pages agree with the code: what they quote, name, list, run and show; their words; pictures."""

import ast
import inspect
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tokenize

import optax
import pytest
import yaml
from runs import ROOT, compiling_as_here, contents, environment
from tiny import MLP, loss_fn, make_batch

import jddp
import jddp.data
from jddp.__main__ import SHARED
from jddp.config.files import flatten
from jddp.config.keys import is_at, keys_of
from jddp.distributed.launcher import DETERMINISTIC
from jddp.engine.strategy import REFUSED
from jddp.ground.errors import ExitCode

FOLDERS = ("*.md", "docs/**/*.md", "tests/**/*.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
ANCHOR = re.compile(r"`((?:jddp|examples|tests)/[\w/]+\.py):([\w.]+)`(?:\]\(([^)]*)\))?")
QUOTE = re.compile(ANCHOR.pattern + r"[^`]*?:?\n\n```python\n(.*?)```", re.DOTALL)


def definition(path, name):
    """Source of the function, method or class that `name` stands for in the file, or None."""
    source = (ROOT / path).read_text()
    body = ast.parse(source).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return None
        body = found[0].body
    return ast.get_source_segment(source, found[0])


def test_pages_name_code_that_is_there():
    wrong = []
    for page in PAGES:
        for path, name, link in ANCHOR.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if definition(path, name) is None or (link and target != ROOT / path):
                wrong.append(f"{page.name}: {path}:{name}")
    for page in ROOT.glob("tests/**/README.md"):
        named = re.findall(r"`(?:tests/)?((?:\w+/)+test_\w+\.py)`", page.read_text())
        wrong += [f"{page}: {path}" for path in named if not (ROOT / "tests" / path).exists()]
    assert not wrong


def files_entered(call):
    """The files of jddp whose functions a call runs, in the order in which it first enters them."""
    found, package = {}, f"{ROOT}/jddp/"

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            found[file.removeprefix(f"{ROOT}/")] = True

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [*found]


def test_a_step_enters_the_files_that_the_page_on_architecture_lists_and_no_other():
    ddp, batch = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn), make_batch(16)
    state, _ = ddp.step(ddp.init(0, batch), batch)
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## The way of a batch through a step")[2].partition("\n## ")[0]
    listed = {path for path, *_ in ANCHOR.findall(section.partition("\nRead these")[0])}
    # For a new form of rows alone, and on the devices.
    listed -= {"jddp/reduce/plan.py", "jddp/engine/step.py"}
    entered = files_entered(lambda: ddp.step(state, batch))
    assert {*entered} == listed
    assert len(entered) <= 8


def parts_of(page):
    """The anchors of a page: its headings, as GitHub and the site name them, and its own."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return headings | set(re.findall(r'<a id="([\w-]+)"', text))


def test_links_to_a_part_of_a_page_lead_to_a_heading_or_an_anchor():
    links = [
        (page, target, anchor)
        for page in [*PAGES, *ROOT.glob("benchmarks/*.md")]
        for target, anchor in re.findall(r"\]\(((?:[\w./]+\.md)?)#([\w-]+)\)", page.read_text())
    ]
    assert len(links) > 50
    assert not [
        (page.name, target, anchor)
        for page, target, anchor in links
        if anchor not in parts_of((page.parent / target) if target else page)
    ]


def test_pages_quote_code_as_it_is():
    wrong = []
    for page in PAGES:
        for path, name, _, quoted in QUOTE.findall(page.read_text()):
            lines = {line.strip() for line in definition(path, name).splitlines()}
            others = {line.strip() for line in quoted.splitlines()} - lines - {"", "..."}
            wrong += [f"{page.name}: {path}:{name}: {line}" for line in others]
    assert not wrong
    page = (ROOT / "docs" / "life_of_a_gradient.md").read_text()  # quotes nothing else
    assert page.count("```python") == len(QUOTE.findall(page))


@pytest.mark.slow
def test_the_readme_and_the_page_that_uses_its_names_run_as_pasted(tmp_path):
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/python.md")]
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(pages), re.DOTALL)
    program = "\n".join(blocks)  # of one session: the later ones use the names of the first
    env = {**os.environ, **compiling_as_here(), "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": env, "text": True}
    shown = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)
    assert shown.returncode == 0
    assert "eval 200  loss 0." in shown.stdout
    assert shown.stdout.count(" all-reduce ") >= 2


FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))


def test_pictures_are_as_their_script_makes_them_and_each_stands_in_a_page_with_a_text(tmp_path):
    subprocess.run([sys.executable, FOLDER / "make.py", tmp_path], check=True)
    there = {path.relative_to(FOLDER): path.read_bytes() for path in PICTURES}
    assert contents(tmp_path) == there, "run python docs/pictures/make.py"
    image = re.compile(r"!\[[^]]{21,}\]\((\S+\.svg)\)")
    shown = {
        (x.parent / y).resolve()
        for x in [*PAGES, *ROOT.glob("benchmarks/*.md")]
        for y in image.findall(x.read_text())
    }
    assert shown == set(PICTURES)


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
    assert sorted(name for group in STAGE["API"].values() for name in group) == PUBLIC


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
    fields += [set(about) for about in json.loads((folder / "arrays.json").read_text()).values()]
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
    pages -= {"python"}
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
    assert "{'learning_rate': 0." in run_page("sweeps", lambda block: True, tmp_path)
    (study,) = (tmp_path / "runs" / "a").iterdir()
    assert len([*study.iterdir()]) == 10


MANUAL = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
KEYS = keys_of(jddp.Config)


def shell_lines(text):
    """The commands of a page, one a line, without prompts, comments and output."""
    for kind, block in re.findall(r"^```(bash|console)\n(.*?)^```", text, re.M | re.S):
        lines = block.replace("\\\n", " ").splitlines()
        lines = [x[2:] for x in lines if x.startswith("$ ")] if kind == "console" else lines
        yield from (re.sub(r"(^| +)#.*", "", line) for line in lines)


@pytest.mark.parametrize("path", MANUAL, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", MANUAL, ids=lambda path: path.stem)
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


GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
ROW = re.compile(r"^\| (`.+`) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(GUIDE.partition("## Words that are not used")[2].partition("\n## ")[0])
INSTEAD = {word: terms for words, terms in ROWS for word in re.findall("`(.+?)`", words)}
PHRASES = "|".join(r"\s+".join(map(re.escape, word.split())) for word in INSTEAD)
FORBIDDEN = re.compile(rf"\b({PHRASES})\b(?!/|-all-to-all)", re.I)  # but in paths and in HLO
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
TEXTS = [
    *map(ROOT.joinpath, NAMES),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("tests/**/*.md")),
]
TEXTS.append(ROOT / "benchmarks" / "README.md")
CODE_FOLDERS = ("jddp/**/*.py", "examples/**/*.py", "benchmarks/**/*.py", "docs/**/*.py")
CODE = [path for folder in CODE_FOLDERS for path in sorted(ROOT.glob(folder))]


def prose(path):
    """The text of a page, or the strings and comments of a module; without `code`."""
    text = path.read_text()
    if path.suffix == ".py":
        constants = [x.value for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Constant)]
        strings = [value for value in constants if isinstance(value, str)]
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT]
        text = "\n\n".join([*strings, " ".join(comments)])
    return re.sub(r"`[^`\n]+`", "``", text)


def test_only_words_of_the_glossary_are_used():
    assert {"goes on", "one's own", "to the bit"} <= INSTEAD.keys()
    assert FORBIDDEN.search("The run goes\n    on.")
    assert not FORBIDDEN.search("goes_on, ragbag")
    wrong = []
    for path in [*TEXTS, *CODE]:
        text = prose(path)
        for found in FORBIDDEN.finditer(text):
            word = " ".join(found[0].lower().split())
            around = text[max(0, found.start() - 40) : found.end() + 40]
            wrong.append(f"{path.relative_to(ROOT)}: {around!r}: for {word!r}, {INSTEAD[word]}")
    assert not wrong
