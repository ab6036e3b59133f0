"""What the pages quote from the code still stands there.

A page names code as [`jddp/file.py:function`](../jddp/file.py). If a Python block follows it, every
line of the block is a line of that function, "..." aside.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jddp

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
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
    assert not wrong


def test_pages_quote_code_as_it_is():
    wrong = []
    for page in PAGES:
        for path, name, _, quoted in QUOTE.findall(page.read_text()):
            lines = {line.strip() for line in definition(path, name).splitlines()}
            others = {line.strip() for line in quoted.splitlines()} - lines - {"", "..."}
            wrong += [f"{page.name}: {path}:{name}: {line}" for line in others]
    assert not wrong


def test_the_life_of_a_gradient_quotes_nothing_else():
    page = (ROOT / "docs" / "life_of_a_gradient.md").read_text()
    assert page.count("```python") == len(QUOTE.findall(page))


def test_the_readme_runs_as_pasted(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = "\n".join(blocks)  # of one session: the later ones use the names of the first
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shown.returncode == 0
    assert "eval 200  loss 0." in shown.stdout
    assert " all-reduce " in shown.stdout


# What docs/life_of_a_gradient.md claims of the wire.


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))))


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


BATCH = {
    "x": jax.ShapeDtypeStruct((16, 4), np.float32),
    "y": jax.ShapeDtypeStruct((16, 1), np.float32),
}


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("bucket_mb, num_buckets", [(25, 1), (200 / 2**20, 3)])
def test_a_model_without_buffers_sends_its_buckets_and_one_small_vector(
    bucket_mb, num_buckets, accumulate_steps
):
    options = {"bucket_mb": bucket_mb, "layout": "flat", "accumulate_steps": accumulate_steps}
    ddp = jddp.DataParallel(Mlp(), optax.adam(1e-3), squared_error, **options)
    program = ddp.lower(BATCH).compile().as_text()
    assert len(ddp.plan) == num_buckets
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == num_buckets + 1
    assert not re.findall(r" (?:all-gather|all-to-all|collective-\w+|reduce-scatter)\(", program)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_mean_of_ones_own_is_n_times_too_large_under_the_default_check(check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def step(w, x):
        return jax.lax.pmean(jax.grad(lambda w: (w * x).mean())(w), "data")

    x = np.arange(16, dtype=np.float32)
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    averaged = jax.shard_map(step, mesh=mesh, **specs)(np.float32(1), x)
    assert averaged == x.mean() * (mesh.size if check_vma else 1)
