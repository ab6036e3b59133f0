"""The figures of scripts/sizes.py, read from modules of a few lines."""

import ast

import pytest
import sizes
import structure


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


def test_effects_at_import_are_those_on_what_other_modules_hold():
    source = """
import os, sys
from warnings import filterwarnings
log = f()
log.addFilter(g)
sys.excepthook = g
os.environ["x"] = "y"
filterwarnings("ignore")
def h():
    os.chdir("/")
"""
    assert structure.effects_at_import(ast.parse(source)) == [6, 7, 8]


def test_questions_to_parts_are_counted_outside_of_the_module_of_the_step():
    modules = read(
        **{"engine.spec": "from jddp.engine.guard import Guard\nisinstance(x, Guard)"},
        **{"engine.guard": "@final\nclass Guard: ...\nclass State: ..."},
        verify="isinstance(x, list | Guard)\nisinstance(x, State)",
    )
    assert structure.questions_to_parts(modules, "jddp.engine.spec") == ["jddp.verify:1"]


SIGNATURES = """
class Plan:
    def make(self, a, b, *, option=None) -> tuple[int, tuple[int, int, int]] | None: ...
    def _make(self, a, b, *, option=None) -> tuple[int, ...]: ...
"""


def test_lines_of_code_parameters_and_items_of_returned_tuples_are_counted():
    assert sizes.code_lines('"""Text."""\n\nx = [\n    1,  # one\n]\n# end\n') == {3, 4, 5}
    found = structure.functions(ast.parse(SIGNATURES))
    (public, name, _), (private, _, is_public) = found
    assert (name, is_public) == ("Plan.make", False)
    assert structure.count_parameters(public, is_public=True) == 2  # without public options
    assert structure.count_parameters(private, is_public=False) == 3
    assert (structure.largest_tuple(public), structure.largest_tuple(private)) == (3, 1)
