"""Makes the pages of the site: those of the repository, and references read from the code.

    python docs/stage.py build/pages

A page of docs/ keeps its name. A comment `<!-- made: NAME -->` in a page is replaced by what the
function NAME below returns. Notebooks of examples/notebooks/ become pages, which the build runs. A
link to a file that is no page leads to a page that shows the file, which search leaves out.
"""

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Pages of the repository that stand elsewhere, by their names on the site.
ELSEWHERE = {
    ROOT / "README.md": "index.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "DATA_LICENSES.md": "data_licenses.md",
    ROOT / "benchmarks" / "README.md": "benchmarks.md",
}
NAMES = {path: str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md"))}
# Kept as scripts without outputs, which `scripts/docs` runs.
NOTEBOOKS = {
    path: f"notebooks/{path.stem}.ipynb" for path in sorted(ROOT.glob("examples/notebooks/*.py"))
}
SITE = ELSEWHERE | NAMES | NOTEBOOKS
NOT_COPIED = {".py", ".md", ".css", ".js"}  # Other files of docs/, such as pictures, are copied.
NOT_SEARCHED = {"changelog.md", "decisions.md"}  # They name everything, and explain little of it.
LEXERS = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".sbatch": "bash"}

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
MARK = re.compile(r"^<!-- made: (.+) -->$", re.M)

# The public names, in groups for readers.
API = {
    "Training": ["DataParallel", "TrainState", "fit", "Run", "open_run", "Checkpoints"],
    "Reports": ["BucketPlan", "explain", "memory", "diagnose", "verify"],
    "Losses, metrics, models": [
        "Mean",
        "Metric",
        "all_gather",
        "replica_key",
        "sync_batch_norm",
        "register_batch_norm",
    ],
    "Options": [
        "Reduction",
        "SyncBatchNorm",
        "Precision",
        "ZeRO1",
        "FSDP",
        "LogicalReplicas",
        "LocalSteps",
    ],
    "Data": [
        "data.TrainBatches",
        "data.WorkerBatches",
        "data.eval_batches",
        "data.Epochs",
        "data.Order",
        "data.MixtureOrder",
        "data.ArrayExamples",
        "data.RowExamples",
        "data.DataSet",
        "data.DataSource",
        "data.make_source",
        "data.make_data_set",
        "data.source_of",
        "data.load_weights",
        "data.count_steps",
    ],
    "Gradients": ["average_gradients", "CommHook", "powersgd", "AXIS"],
    "Parts of a run": ["Checks", "Evaluation", "Keep"],
    "Callbacks": ["Callback", "EarlyStopping", "KeepBest"],
    "Jobs": ["Config", "train", "launch"],
    "Errors": ["Error", "ConfigError", "DataError"],
}
# Keys of a config have a page, and the methods of local steps are called by the engine alone.
WITHOUT_MEMBERS = ("Config", "LocalSteps", "Reduction", "SyncBatchNorm", "Precision")


class Stage:
    """The folder of staged pages.

    Args:
      folder: Where pages are written; what is in it is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: dict[Path, str] = {}  # Files and folders that a page links to.

    def write_all(self) -> None:
        """Writes every page."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path, name in SITE.items():
            if path in NOTEBOOKS:
                self.write(name, self.notebook(path))
                self.write(f"notebooks/download/{path.stem}.ipynb", download(path))
            elif name != "index.md" or path.parent == DOCS:
                self.write(name, self.text(path))
        for group in API.values():
            for name in group:
                self.write(f"api/{name}.md", describe(name))
        written: set[Path] = set()
        while missing := self.shown.keys() - written:  # A folder shows further files.
            for path in sorted(missing):
                self.write(self.shown[path], self.show(path))
            written |= missing
        for path in sorted(DOCS.rglob("*")):
            if path.is_file() and self.is_copied(path) and "__pycache__" not in path.parts:
                copy = self.folder / path.relative_to(DOCS)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)

    def is_copied(self, path: Path) -> bool:
        """Whether a file is a part of pages, such as a picture."""
        return path.is_relative_to(DOCS) and path.suffix not in NOT_COPIED

    def write(self, name: str, text: str) -> None:
        """Writes one page."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def text(self, path: Path) -> str:
        """A page with its links as they are on the site, and what is made for it."""
        name = SITE[path]

        def fill(mark: re.Match[str]) -> str:
            return self.linked(MADE[mark[1]](), path, name)

        head = "---\nnosearch: true\n---\n\n" if name in NOT_SEARCHED else ""
        return head + MARK.sub(fill, self.linked(path.read_text(), path, name))

    def notebook(self, path: Path) -> str:
        """A notebook without outputs, with its links as they are on the site."""
        import jupytext

        notebook = jupytext.read(path, fmt="py:percent")
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.linked(cell.source, path, SITE[path])
        link = f"{{download}}`Download this notebook <download/{path.stem}.ipynb>`"
        notebook.cells[0].source += f"\n\n{link}"
        return jupytext.writes(notebook, fmt="ipynb")

    def linked(self, text: str, path: Path, name: str) -> str:
        """Text of the file `path`, with links for the page `name`."""
        done, start = [], 0
        for fence in [*FENCE.finditer(text), None]:
            part = text[start : fence.start() if fence else len(text)]
            part = re.sub(r'^<a id="([\w-]+)"></a>$', r"(\1)=", part, flags=re.M)
            part = re.sub(r'<a id="([\w-]+)"></a>', r"[]{#\1}", part)
            part = LINK.sub(lambda link: link[1] + self.target(link[2], path, name) + link[3], part)
            done.append(part)
            if fence:
                done.append(fence[0])
                start = fence.end()
        return "".join(done)

    def target(self, target: str, path: Path, name: str) -> str:
        """Where a link of the file `path` leads from the page `name`."""
        file, _, anchor = target.partition("#")
        if not file or re.match(r"\w+:", target):
            return target
        found = (path.parent / file).resolve()
        if found in SITE:
            to = SITE[found]
        elif found.parent == DOCS / "api" or self.is_copied(found):
            to = str(found.relative_to(DOCS))
        else:
            to = self.shown.setdefault(found, f"files/{found.relative_to(ROOT)}.md")
            anchor = ""  # A file is shown as text, which has none.
        return os.path.relpath(to, Path(name).parent) + (f"#{anchor}" if anchor else "")

    def show(self, path: Path) -> str:
        """A page with the text of a file, or the names in a folder."""
        name = path.relative_to(ROOT)
        head = f"---\norphan: true\nnosearch: true\nhide-toc: true\n---\n\n# `{name}`\n\n"
        if path.is_dir():
            files = [x for x in sorted(path.iterdir()) if x.is_file()]
            page = self.shown[path]
            links = (f"- [`{x.name}`]({self.target(x.name, path / 'x', page)})\n" for x in files)
            return head + "".join(links)
        lexer = LEXERS.get(path.suffix, "text")
        text = f"{{code-block}} {lexer}\n:class: whole-file\n\n{path.read_text()}"
        return f"{head}``````{text}\n``````\n"


def download(path: Path) -> str:
    """A notebook without outputs, to run elsewhere: links to the repository are their text."""
    import jupytext

    notebook = jupytext.read(path, fmt="py:percent")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\[([^]]+)\]\((?!\w+:)[^)]+\)", r"\1", cell.source)
    return jupytext.writes(notebook, fmt="ipynb")


def first_program() -> str:
    """The first Python block of the README, which runs as pasted."""
    return re.search(r"^```python\n.*?^```", (ROOT / "README.md").read_text(), re.M | re.S)[0]


def public(name: str) -> Any:
    """The object with a public name, such as "fit" or "data.Order"."""
    room, _, inner = f"jddp.{name}".rpartition(".")
    return getattr(importlib.import_module(room), inner)


def describe(name: str) -> str:
    """The page of a public name: its docstring, by autodoc."""
    found = public(name)
    kind = "class" if isinstance(found, type) else "function" if callable(found) else "data"
    options = []
    if kind == "class":
        is_error = issubclass(found, Exception)
        options += ["show-inheritance"] * is_error
        options.append("no-members" if is_error or name in WITHOUT_MEMBERS else "members")
    lines = [f".. auto{kind}:: jddp.{name}", *(f"   :{option}:" for option in options)]
    more = "\n[Every key](../config.md).\n" if name == "Config" else ""
    directive = "\n".join(lines)
    return f"# `{name}`\n\n```{{eval-rst}}\n{directive}\n```\n{more}"


def summary(name: str) -> str:
    """The first sentence of the docstring of a public name, in Markdown."""
    found = public(name)
    if isinstance(found, str):
        return "Name of the axis of the replicas, unless another is chosen."
    return " ".join((found.__doc__ or "").strip().split("\n\n")[0].split())


def api() -> str:
    """Every public name with its first sentence, in groups."""
    parts = []
    for title, names in API.items():
        rows = "".join(f"| [`{x}`](api/{x}.md) | {summary(x)} |\n" for x in names)
        pages = "\n".join(f"{x} <api/{x}>" for x in names)
        table = f"## {title}\n\n| name | meaning |\n| --- | --- |\n{rows}\n"
        parts.append(f"{table}```{{toctree}}\n:hidden:\n{pages}\n```\n")
    return "\n".join(parts)


def config_keys() -> str:
    """Every key of a config: type, range, default, meaning, and whether it may change."""
    from jddp.config.keys import keys_of
    from jddp.config.schema import Config

    may = {"none": "yes", "result": "yes", "rounding": "yes, up to rounding", "numbers": "no"}
    parts, last = [], ""
    for path, field in keys_of(Config).items():
        if path[:-1] and path[0] != last:
            last = path[0]
            about = Config.model_fields[last].annotation.__doc__.strip().splitlines()[0]
            parts.append(f"## {last}\n\n{about}\n")
        key = ".".join(path)
        kind = ", ".join([type_of(field.annotation), *bounds(field.metadata)])
        default = json.dumps(field.get_default(call_default_factory=True)).strip('"')
        facts = f"{kind[0].upper()}{kind[1:]}. Default: `{default}`. "
        facts += f"May change when a run resumes: {may[field.json_schema_extra['effect']]}."
        anchor = key.replace(".", "-").replace("_", "-")
        about = field.description.replace("<", "&lt;")
        parts.append(f"[`{key}`]{{#{anchor}}}\n: {about}\\\n  {facts}\n")
    return "\n".join(parts)


def type_of(kind: Any) -> str:
    """Words for the type of a key, with its range."""
    from jddp.config.options import Section

    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return ", ".join([type_of(inner[0]), *bounds(inner[1:])])
    if origin is Literal:
        return " or ".join(f"`{x}`" for x in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_of, inner))
    if origin is list:
        return f"a list ({type_of(inner[0])})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words |= {types.NoneType: "null", dict: "a mapping"}
    if isinstance(kind, type) and issubclass(kind, Section):
        words[kind] = f"a mapping with {', '.join(kind.model_fields)}"
    return words[origin or kind]


def bounds(rules: Iterable[Any]) -> list[str]:
    """Words for the range of a key."""
    words = {"ge": "at least", "gt": "above", "lt": "below"}
    flat = [x for rule in rules for x in getattr(rule, "metadata", [rule])]  # `Field` holds several
    return [
        f"{text} {getattr(x, name):,}"
        for x in flat
        for name, text in words.items()
        if getattr(x, name, None) is not None
    ]


def commands() -> str:
    """Every command with its help, and those of its own commands."""
    from jddp.__main__ import COMMANDS

    def help_of(*words: str) -> str:
        command = [sys.executable, "-m", "jddp", *words, "--help"]
        environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return done.stdout.strip()

    def page(command: tuple[str, str]) -> str:
        command_name, about = command
        text = help_of(command_name)
        parts = [
            f"## `jddp {command_name}`\n\n{about[0].upper()}{about[1:]}.\n\n```text\n{text}\n```\n"
        ]
        below = re.search(r"^  COMMAND\n((?:    .+\n)+)", text, re.M)
        for name in re.findall(r"^    (\w+)", below[1], re.M) if below else ():
            shown = help_of(command_name, name)
            parts.append(f"### `jddp {command_name} {name}`\n\n```text\n{shown}\n```\n")
        return "\n".join(parts)

    with ThreadPoolExecutor(2) as pool:
        return "\n".join(pool.map(page, COMMANDS.items()))


def examples() -> str:
    """Every example with the first sentence of its docstring."""
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text()))
        if about:
            link = f"[`{path.name}`](../examples/{path.name})"
            rows.append(f"| {link} | {about.splitlines()[0]} |")
    return "| example | shows |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def shipped_models() -> str:
    """Every model by its name in a config, with its arguments and their defaults."""
    from jddp.zoo.models import MODELS

    return "\n".join(entry("model", name, found) for name, found in sorted(MODELS.items()))


def shipped_losses() -> str:
    """Every loss by its name in a config, with its arguments and their defaults."""
    from jddp.zoo.losses import LOSSES

    return "\n".join(entry("loss", name, found) for name, found in sorted(LOSSES.items()))


def optimizers() -> str:
    """Every optimizer of optax, by what each replica updates where parameters are divided."""
    made: str = runpy.run_path(str(DOCS / "optimizers.py"))["table"]()
    return made


def entry(section: str, name: str, found: Any) -> str:
    """A model or a loss: its first sentence, and a table of its arguments."""
    from jddp.ground.names import defaults_of

    inner = getattr(found, "func", found)
    fixed = getattr(found, "keywords", {})
    texts = about_arguments(inner)
    rows = []
    for argument, default in defaults_of(inner).items():
        is_option = argument in texts and default is not inspect.Parameter.empty
        if is_option and argument not in fixed:
            rows.append(f"| `{section}.kwargs.{argument}` | `{default}` | {texts[argument]} |\n")
    table = "".join(["| key | default | meaning |\n| --- | --- | --- |\n", *rows]) if rows else ""
    first = " ".join((inspect.getdoc(inner) or "").split("\n\n")[0].split())
    return f"### `{section}.name={name}`\n\n{first}\n\n{table}"


def about_arguments(found: Any) -> dict[str, str]:
    """The text of a docstring on each argument or attribute."""
    texts: dict[str, str] = {}
    owners = [found]
    if isinstance(found, type):
        owners = [part for kind in reversed(found.__mro__) for part in (kind, kind.__init__)]
    for owner in owners:
        text = inspect.getdoc(owner) or ""
        for part in re.findall(r"^(?:Args|Attributes):\n((?: +.*\n?|\n)+)", text, re.M):
            for item in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", part, re.M):
                texts[item[0]] = " ".join(item[1].split())
    return texts


MADE: dict[str, Callable[[], str]] = {
    "api": api,
    "shipped_losses": shipped_losses,
    "shipped_models": shipped_models,
    "commands": commands,
    "config_keys": config_keys,
    "examples": examples,
    "first_program": first_program,
    "optimizers": optimizers,
}


def main() -> None:
    """Writes all pages into the folder that is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    Stage(parser.parse_args().folder.resolve()).write_all()


if __name__ == "__main__":
    main()
