"""The figures of scripts/sizes.py, read from modules of a few lines."""

import ast
import subprocess

import ceilings
import effects
import pytest
import sizes
import structure
import tricks
import untyped
from ceilings import Figure


def read(**sources):
    sources = {f"jddp.{name}": source for name, source in sources.items()}
    return {name: ast.parse(source) for name, source in sources.items()}


@pytest.mark.parametrize(
    "back",
    [
        "from jddp.high import x",
        "def f():\n    from jddp.high import x",
        "if TYPE_CHECKING:\n    from jddp import high",
        "importlib.import_module('jddp.high')",
    ],
)
def test_a_circle_is_found_however_the_import_is_written(back):
    modules = read(high="from jddp.middle import y", middle="import jddp.low", low="import jax")
    assert structure.circles(structure.imports(modules)) == []
    imports = structure.imports(modules | read(low=back))
    assert structure.circles(imports) == [{"jddp.high", "jddp.middle", "jddp.low"}]
    assert structure.reached("jddp.middle", imports) == {"jddp.high", "jddp.low"}


def test_names_and_keys_count_where_they_are_defined():
    first = "from jddp.b import B\nclass A: ...\ndef f(): ...\nMean = float\ndef _g(): ..."
    second = "class A: ...\ndef f(): ...\nMean = int\ndef _g(): ...\nclass B: ...\nBYTES = 1"
    assert structure.defined_twice(read(a=first, b=second)) == ["A", "Mean", "f"]
    homes = {"a": "def _f(): ...", "b": "class _f: ...", "c": "_f = 1", "d": "_f: int = 1\n_g = 1"}
    assert structure.private_in_many(read(**homes)) == ["_f"]
    section = (
        "class Base(BaseModel):\n    name: str\nclass Inner(Base):\n    W: ClassVar[str] = ''\n"
    )
    modules = read(**{"config.schema": f"{section}    depth: int = 1\n"}, other=section)
    assert structure.config_keys(modules) == ["Base.name", "Inner.depth"]


def test_aliases_of_any_are_counted_wherever_they_are_made_and_however_they_are_imported():
    typing = "from typing import Any as Anything\nTree = Anything\nRecord = Mapping[str, Tree]\n"
    typing += "Loss = Callable[..., Tree]\nSIZE: Tree = 1"
    use = "import jddp.typing as t\nfrom jddp.typing import Tree as T\n"
    use += "x: T | t.Record\nTree = 1\nTree"
    modules = read(typing=typing, use=use)
    aliases, spellings = untyped.aliases(modules)
    assert aliases == {"jddp.typing.Tree", "jddp.typing.Record"}
    assert untyped.count_uses(read(use=use), spellings) == 2
    assert untyped.count_uses(modules, {untyped.ANY}) == 1


def test_hard_exits_globals_and_tricks_are_found_under_other_names():
    source = (
        "import dis, os, sys\nfrom os import _exit as leave, execve\ndef f():\n    global x, y\n"
    )
    source += "    leave(1)\n    execve(dis.opname, 1)\n    sys.exit = sys.stdout = os._exit\n"
    modules = read(a=source)
    assert tricks.hard_exits(modules) == ["jddp.a:5", "jddp.a:7"]
    assert tricks.globals_of(modules) == ["jddp.a:4"]
    assert tricks.tricks(modules) == [
        f"jddp.a: {x}" for x in ("os.execve", "dis.opname", "sys.exit")
    ]


EFFECTS = {
    "quiet": "import contextlib, logging\nwith contextlib.suppress(ImportError): import library\n"
    "log = logging.getLogger('jddp')",
    "logs": "from jddp.quiet import log\nadd = log.addFilter\nadd(print)",
    "sets": "from os import environ\nimport jddp.logs\nset = environ.setdefault\nset('JDDP_A', '')",
    "replaces": "import sys\nsys.modules[__name__] = print",
}


def test_effects_at_import_are_seen_at_the_module_that_makes_them(tmp_path):
    (tmp_path / "jddp").mkdir()
    sources = {"__init__": "", **EFFECTS, "../library": "import os\nos.environ['A'] = ''"}
    for name, source in sources.items():
        (tmp_path / "jddp" / f"{name}.py").write_text(source)
    assert effects.effects(read(**EFFECTS), tmp_path) == {
        "jddp.logs": ["logging jddp.filters"],
        "jddp.sets": ["environ JDDP_A"],
        "jddp.replaces": ["module jddp.replaces"],
    }


def test_lines_of_code_and_of_imports_parameters_and_returned_items_are_counted():
    assert sizes.code_lines('"""Text."""\n\nx = [\n    1,  # one\n]\n# end\n') == {3, 4, 5}
    tree = ast.parse("import a\nfrom b import (\n    c,\n)\nx = 1")
    assert structure.import_lines(tree) == {1, 2, 3, 4}
    source = "class P:\n    def f(self, a, *, o=None) -> tuple[int, tuple[int, int, int]]: ...\n"
    ((function, name),) = structure.functions(ast.parse(source))
    assert (name, structure.count_parameters(function)) == ("P.f", 2)
    assert structure.largest_tuple(function) == 3


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "ceilings.toml"
    ceilings.write({"lines": 90, "names": 9, "not counted": 1}, file)
    return file


def commit(file):
    name = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=file.parent, check=True)


def test_a_ceiling_falls_with_its_figure_and_a_figure_above_it_fails_and_leaves_it(file, capsys):
    figures = [Figure("lines", 70, 80, rests=False), Figure("names", 7, 8), Figure("new", 5, 4)]
    assert ceilings.hold([Figure("names", 10, 8)], lower=True, file=file) == 1
    assert "TOO MANY" in capsys.readouterr().out
    assert ceilings.hold(figures, lower=False, file=file) == 0
    assert ceilings.read(file) == {"lines": 90, "names": 9, "not counted": 1}
    assert ceilings.hold(figures, lower=True, file=file) == 0
    assert ceilings.read(file) == {"lines": 70, "names": 8, "new": 5, "not counted": 1}


@pytest.mark.parametrize("later", [{"lines": 90, "names": 10}, {"lines": 90}])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_ceiling_that_was_ever_lower_cannot_be_raised_or_dropped(file, later, is_committed):
    figures = [Figure("lines", 90, 80), Figure("names", 9, 8)]
    commit(file)
    assert ceilings.hold(figures, lower=True, file=file) == 0
    ceilings.write(later, file)
    if is_committed:
        commit(file)
        commit(file)  # of something else
    assert ceilings.hold(figures, lower=True, file=file) == 1
    assert ceilings.read(file) == later
