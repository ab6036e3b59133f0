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
        "import jddp.high",
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


def test_names_in_two_modules_are_those_of_what_is_defined_there():
    first = "from jddp.b import B\nclass A: ...\ndef f(): ...\nMean = float\ndef _g(): ..."
    second = "class A: ...\ndef f(): ...\nMean = int\ndef _g(): ...\nclass B: ...\nBYTES = 1"
    assert structure.defined_twice(read(a=first, b=second)) == ["A", "Mean", "f"]


def test_a_private_name_is_found_in_four_modules_whatever_it_is():
    homes = {"a": "def _f(): ...", "b": "class _f: ...", "c": "_f = 1", "d": "_f: int = 1\n_g = 1"}
    assert structure.private_in_many(read(**homes)) == ["_f"]
    assert structure.private_in_many(read(**homes | {"d": "def g():\n    _f = 1"})) == []


CONFIG = """
class Base(BaseModel):
    name: str = option(None, "Inherited by all.")
class Inner(Base):
    WORD: ClassVar[str] = "depth"
    depth: int = 1
class Outer(Base):
    inner: Inner
class Mistake(NamedTuple):
    text: str
"""


def test_config_keys_are_the_fields_of_sections_each_where_it_is_declared():
    modules = read(**{"config.schema": CONFIG}, other=CONFIG)
    assert structure.config_keys(modules) == ["Base.name", "Inner.depth", "Outer.inner"]


def test_aliases_of_any_are_counted_wherever_they_are_made_and_however_they_are_imported():
    typing = """
from typing import Any as Anything
Tree = Anything
Record = Mapping[str, Tree]
Loss = Callable[..., Tree]
Pair = tuple[Tree, Tree]
SIZE: Tree = 1
"""
    use = "import jddp.typing as t\nfrom jddp.typing import Tree as T\n"
    use += "x: T | t.Record\nTree = 1\nTree"
    modules = read(typing=typing, use=use)
    aliases, spellings = untyped.aliases(modules)
    assert aliases == {"jddp.typing.Tree", "jddp.typing.Record"}
    assert untyped.count_uses(read(use=use), spellings) == 2
    assert untyped.count_uses(modules, {untyped.ANY}) == 1


def test_hard_exits_globals_and_tricks_are_found_under_other_names():
    source = """
import dis, os, sys
from os import _exit as leave, execve
from threading import _register_atexit
def f():
    global x, y
    leave(1)
    execve(dis.opname, dis.opname)
    sys.exit = sys.excepthook = sys.stdout = os._exit
    time = g()
    time._asdict()
"""
    modules = read(a=source)
    assert tricks.hard_exits(modules) == ["jddp.a:7", "jddp.a:9"]
    assert tricks.globals_of(modules) == ["jddp.a:6"]
    found = ["os.execve", "dis.opname", "sys.exit"]
    assert tricks.tricks(modules) == [f"jddp.a: {name}" for name in found]


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


SIGNATURES = """
class Plan:
    def make(self, a, b, *, option=None) -> tuple[int, tuple[int, int, int]] | None: ...
    def _make(self, a) -> tuple[int, ...]: ...
"""


def test_lines_of_code_and_of_imports_parameters_and_returned_items_are_counted():
    assert sizes.code_lines('"""Text."""\n\nx = [\n    1,  # one\n]\n# end\n') == {3, 4, 5}
    assert structure.import_lines(ast.parse("import a\nfrom b import (\n    c,\n)\nx = 1")) == {
        1,
        2,
        3,
        4,
    }
    (public, name), (private, _) = structure.functions(ast.parse(SIGNATURES))
    assert name == "Plan.make"
    assert (structure.count_parameters(public), structure.count_parameters(private)) == (3, 1)
    assert (structure.largest_tuple(public), structure.largest_tuple(private)) == (3, 1)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "ceilings.toml"
    ceilings.write({"lines": 90, "names": 9, "not counted": 1}, file)
    return file


def commit(file):
    name = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=file.parent, check=True)


def test_a_ceiling_falls_with_its_figure_to_its_goal_and_of_lines_further(file):
    figures = [Figure("lines", 70, 80, rests=False), Figure("names", 7, 8), Figure("new", 5, 4)]
    assert ceilings.hold(figures, lower=False, file=file) == 0
    assert ceilings.read(file) == {"lines": 90, "names": 9, "not counted": 1}
    assert ceilings.hold(figures, lower=True, file=file) == 0
    assert ceilings.read(file) == {"lines": 70, "names": 8, "new": 5, "not counted": 1}


def test_a_figure_above_its_ceiling_fails_and_leaves_it(file, capsys):
    assert ceilings.hold([Figure("names", 10, 8)], lower=True, file=file) == 1
    assert ceilings.read(file)["names"] == 9
    assert "TOO MANY" in capsys.readouterr().out


@pytest.mark.parametrize("later", [{"lines": 90, "names": 10}, {"lines": 90}, {"names": 10}])
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


def test_without_history_ceilings_hold_alone(file):
    figures = [Figure("names", 10, 8)]
    ceilings.write({"names": 10}, file)
    assert ceilings.lowest_ever(file) == {}
    assert ceilings.hold(figures, lower=True, file=file) == 0
