"""Packages import only from floors below their own, and libraries are imported by few of them."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest
from house import MODULES, PACKAGE, name_of, room_of

import jddp

# From the ground up. A new room is put here; docs/pictures/make.py draws them for
# docs/architecture.md.
FLOORS = {
    "ground": {"ground"},
    "gradients, models, processes, options": {"reduce", "modules", "distributed", "config"},
    "the step, and what it trains": {"engine", "zoo", "data"},
    "what becomes of a step": {"checkpoint", "inspection"},
    "training": {"trainer"},
    "commands and tools": {"commands", "workbench"},
}
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS.values()) for room in rooms}

# Where a change of a library's API may reach.
HOMES = {"optax": {"reduce", "zoo", "engine", "inspection"}}
HOMES |= {"flax": {"modules", "zoo", "checkpoint", "workbench"}, "orbax": {"checkpoint"}}
HOMES |= {"fsspec": {"checkpoint"}, "omegaconf": {"config"}, "pydantic": {"config"}}
HOMES |= {"tensorboardX": {"workbench"}, "wandb": {"workbench"}}
HOMES |= {"matplotlib": {"workbench"}, "rich": {"trainer"}, "optuna": {"workbench"}}
HOMES |= {"jax.distributed": {"distributed"}, "jax._src": {"distributed"}}
HOMES |= {"jax.shard_map": {"engine"}}
HOMES |= {"jax.experimental.multihost_utils": {"engine"}}
WITHOUT_JAX = {"data", "config", "ground.names", "ground.files", "ground.errors", "trainer.reports"}


def names_used(path):
    """Every dotted name that is imported, also inside functions, or reached through `jax`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{path}:{node.lineno}: write imports in full"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id="jax"), attr=attr):
                yield f"jax.{attr}"
            case ast.Call(func=ast.Name(id="import_extra"), args=[ast.Constant(value=name)]):
                yield name
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=name)]
            ):
                yield name


def reaches(name, target):
    return name == target or name.startswith(target + ".")


USED = {path: set(names_used(path)) for path in MODULES}


def rooms_using(target):
    return {room_of(path) for path, names in USED.items() if any(reaches(x, target) for x in names)}


def test_the_page_of_the_architecture_lists_the_rooms_with_the_first_lines_of_their_docstrings():
    table = ""
    for rooms in reversed(FLOORS.values()):
        for room in sorted(rooms):
            path = PACKAGE / room / "__init__.py"
            path = path if path.exists() else PACKAGE / f"{room}.py"
            first = ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0]
            table += f"| `{room}` | {first} |\n"
    assert table in (PACKAGE.parent / "docs" / "architecture.md").read_text(), table


def test_rooms_import_only_from_floors_below():
    assert {room_of(path) for path in MODULES} <= FLOOR_OF.keys()
    wrong = []
    for path in MODULES:
        room = room_of(path)
        for name in USED[path]:
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            # From jddp itself, which is no room, nothing is imported.
            is_below = FLOOR_OF.get(target, len(FLOORS)) < FLOOR_OF[room]
            if package == "jddp" and target != room and not is_below:
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong


# Rooms that a tool may import, besides public names and the classes of the zoo.
OF_TOOLS = {"checkpoint", "config", "distributed", "engine", "ground", "inspection", "trainer"}
# These modules of the workbench have functions that run inside a step.
INSIDE_A_STEP = {"logical_replicas", "powersgd", "sampling"}


def test_the_workbench_imports_public_names_and_seven_rooms():
    values = {name: getattr(jddp, name) for name in jddp.__all__}
    public = {f"{getattr(x, '__module__', '')}.{name}" for name, x in values.items()}
    for path in MODULES:
        if room_of(path) == "workbench":
            rooms = OF_TOOLS | {"workbench"}
            rooms |= {"modules", "reduce"} if path.stem in INSIDE_A_STEP else set()
            names = {x for x in USED[path] - public if reaches(x, "jddp")}
            names = {x for x in names if not reaches(x, "jddp.zoo.models")}
            assert {x.split(".")[1] for x in names} <= rooms, name_of(path)


def test_libraries_come_in_by_few_doors_and_jax_not_in_what_runs_before_it():
    assert not {x: found for x, rooms in HOMES.items() if (found := rooms_using(x) - rooms)}
    using = [name_of(path) for path in MODULES if any(reaches(x, "jax") for x in USED[path])]
    assert not [name for name in using for room in WITHOUT_JAX if reaches(name, f"jddp.{room}")]


# Packages whose names are not those of their modules, and those that come with another.
PACKAGES = {"orbax": "orbax-checkpoint", "PIL": "pillow", "yaml": "pyyaml"}
PACKAGES |= {"jaxlib": "jax", "jax_plugins": "jax", "fsspec": "s3fs"}
PACKAGES |= {"IPython": "ipykernel", "absl": "grain"}


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.match(r"[\w-]+", package)[0] for group in groups for package in group}
    used = {name.partition(".")[0] for names in USED.values() for name in names}
    others = used - sys.stdlib_module_names - {"jddp"}
    assert {PACKAGES.get(name, name) for name in others} <= declared


LIGHT = """
import sys
import jddp
heavy = {"jax", "numpy", "flax", "optax", "orbax", "pydantic", "omegaconf", "rich"}
assert not heavy & sys.modules.keys()
import jddp.config
assert not {"jax", "numpy"} & sys.modules.keys()
import jddp.data
assert "jax" not in sys.modules
"""


def test_importing_jddp_its_config_or_its_data_imports_nothing_heavy():
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


def test_public_names_are_sorted_and_all_there_also_after_the_import_of_every_module():
    assert jddp.__all__ == sorted(jddp.__all__)
    assert set(jddp.__all__) <= set(dir(jddp))
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = jddp.nonesuch
    for path in MODULES:
        importlib.import_module(name_of(path))
        assert importlib.util.find_spec(name_of(path)) is not None
    for name in jddp.__all__:
        public = getattr(jddp, name)
        assert callable(public) or isinstance(public, str), f"{name} is {public}"


@pytest.mark.parametrize("name", ["launch", "train"])
def test_a_function_stays_after_the_import_of_the_command_of_its_name(name):
    function = getattr(jddp, name)
    command = importlib.import_module(f"jddp.{name}")
    assert callable(command.main)
    assert importlib.reload(command) is command
    assert getattr(jddp, name) is function is not command
