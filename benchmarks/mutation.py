"""Changes the heart of jddp in hundreds of small ways, and counts which of them the tests notice.

    python benchmarks/mutation.py --sample 300                     an hour
    python benchmarks/mutation.py --files jddp/engine/[a-z]*.py    every mutant of the step
    python benchmarks/mutation.py --files jddp/modules/metrics.py --sample 20 --seed 1

A mutant is one operator, number, condition, loop, decorator or exception replaced by another
(cosmic-ray; needs jddp[mutation]). It is killed if a test of its file fails, and survives if none
does. Each worker changes files in a copy of its own. The last lines are the scores, by file and of
all; without `--files` the mutants are those of gradients, reduction, step and metrics.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import random
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).resolve().parent.parent
STEP = ["data_parallel", "against_one_device", "parameters", "ddp_unused"]
HEART = {  # The tests of each file; the tests that notice most come first.
    "jddp/engine/micro_batches.py": [
        *STEP,
        *("overlap", "hooks", "loss_scale", "replica"),
    ],
    "jddp/engine/step.py": [*STEP, "inputs", "verify", "option_pairs", "logical_replicas"],
    "jddp/modules/metrics.py": ["metrics", "data_parallel", "mean", "overlap", "logical_replicas"],
    "jddp/reduce/backward.py": ["overlap", "ddp_cases"],
    "jddp/reduce/hooks.py": [
        *("hooks", "loss_scale", "reduce"),
        *("strategies", "logical_replicas"),
    ],
    "jddp/reduce/plan.py": ["reduce", "hooks"],
    "jddp/reduce/reducer.py": [
        *("reduce", "overlap", "hooks", "ddp_unused", "strategies"),
    ],
    "jddp/reduce/shards.py": ["reduce", "strategies"],
}
TESTS = HEART | {
    "jddp/engine/compiled.py": [
        *("data_parallel", "explain", "inputs", "hooks", "local_steps", "memory"),
    ],
    "jddp/engine/digest.py": ["digest", "replica"],
    "jddp/engine/evaluation.py": ["data_parallel", "mean", "inputs", "replica"],
    "jddp/engine/data_parallel.py": ["data_parallel", "inputs", "explain", "run", "trainer"],
    "jddp/engine/guard.py": ["loss_scale", "numerics", "local_steps", "strategies"],
    "jddp/engine/initial_state.py": ["data_parallel", "weights", "parameters"],
    "jddp/workbench/logical_replicas.py": ["logical_replicas"],
    "jddp/engine/mesh.py": ["mesh", "data_parallel", "axis_name"],
    "jddp/engine/optimizer.py": ["optimizers_of_optax", "ddp_unused"],
    "jddp/engine/state.py": ["replica", "local_steps", "strategies", "run", "checkpoint"],
    "jddp/engine/strategy.py": ["strategies", "local_steps", "option_pairs"],
}
# cosmic-ray replaces each operator by all others, ten mutants of one kind: one stands for
# them. `|` is left out: here it joins types and dicts.
OTHERS = {
    *("BinaryOperator_" + x for x in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Pow_Mul")),
    *("ComparisonOperator_" + x for x in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *("ComparisonOperator_" + x for x in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *("UnaryOperator_" + x for x in ("USub_UAdd", "Delete_Not")),
}


def is_chosen(mutant: MutationSpec) -> bool:
    replaced = mutant.operator_name.removeprefix("core/Replace")
    line, column = mutant.start_pos
    text = mutant.module_path.read_text().splitlines()[line - 1]
    # Cosmic-ray takes the `*` before arguments that are keyword-only for a product. And nothing
    # that is right depends on a `zip` being strict, or on a dataclass being frozen.
    is_no_mistake = text[column:].startswith("*,") or text[:column].endswith(("strict=", "frozen="))
    return not is_no_mistake and ("Operator_" not in replaced or replaced in OTHERS)


def find_mutants(files: list[str]) -> list[MutationSpec]:
    """All mutants of some files, in the order of their lines."""
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/mutants.sqlite") as found:
        init([Path(name) for name in files], found, {})
        mutants = [item.mutations[0] for item in found.work_items]
    mutants = [mutant for mutant in mutants if is_chosen(mutant)]
    return sorted(mutants, key=lambda x: (str(x.module_path), x.start_pos, x.operator_name))


def command(file: str, folder: Path) -> str:
    tests = [str(next(Path("tests").rglob(f"test_{room}.py"))) for room in TESTS[file]]
    # Annotations are not checked: it is what tests assert that is asked for.
    settings = [f"cache_dir={folder / 'cache'}", "addopts=-m 'not slow and not long and not aot'"]
    options = ["-x", "-q", "-n", "0", *(x for setting in settings for x in ("-o", setting))]
    return shlex.join([sys.executable, "-m", "pytest", *options, *tests])


def enter_copy(folder: Path, numbers: Any) -> None:
    """Makes a copy of the checkout, and works there: mutants are written to files."""
    copy = folder / f"copy-{next_number(numbers)}"
    for name in ("jddp", "tests", "configs", "pyproject.toml", "README.md"):
        source = ROOT / name
        copy.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    os.chdir(copy)


def next_number(numbers: Any) -> int:
    with numbers.get_lock():
        numbers.value += 1
        return numbers.value


def check_unchanged(file: str, folder: Path) -> None:
    """Tests that fail anyway would kill every mutant. What is compiled here is kept."""
    outcome, output = run_tests(command(file, folder), timeout=1800)
    if outcome is not TestOutcome.SURVIVED:
        raise RuntimeError(f"{file} is unchanged, and its tests fail:\n{output}")


def try_mutant(mutant: MutationSpec, folder: Path) -> dict[str, Any]:
    file = str(mutant.module_path)
    result = mutate_and_test([mutant], command(file, folder), timeout=900)
    changed = [x for x in (result.diff or "").splitlines() if x[:1] in "+-" and x[:3] not in NAMES]
    return {
        "file": file,
        "line": mutant.start_pos[0],
        "function": mutant.definition_name,
        "operator": mutant.operator_name.removeprefix("core/"),
        "outcome": result.test_outcome.value,
        "change": changed,
    }


NAMES = ("+++", "---")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", choices=TESTS, default=list(HEART))
    parser.add_argument("--sample", type=int, help="how many mutants; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    mutants = find_mutants(arguments.files)
    if arguments.sample:
        mutants = random.Random(arguments.seed).sample(mutants, arguments.sample)
    made, killed = collections.Counter[str](), collections.Counter[str]()  # by file; "" is all
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with concurrent.futures.ProcessPoolExecutor(
            arguments.workers, context, enter_copy, (folder, context.Value("i", 0))
        ) as pool:
            files = sorted({str(mutant.module_path) for mutant in mutants})
            list(pool.map(check_unchanged, files, itertools.repeat(folder)))
            for result in pool.map(try_mutant, mutants, itertools.repeat(folder)):
                made.update(names := (result["file"], ""))
                killed.update(names * (result["outcome"] == "killed"))
                print(json.dumps(result), flush=True)
    for name in sorted(made, reverse=True):
        share = f"{killed[name] / made[name]:.1%} {name}".rstrip()
        print(f"killed {killed[name]} of {made[name]} mutants: {share}")


if __name__ == "__main__":
    main()
