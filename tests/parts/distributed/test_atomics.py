"""Scatters that add keep their atomics on GPUs, in the versions of jaxlib that need a flag."""

import os
import re
import subprocess
import sys

import pytest
from runs import ROOT, environment

from jddp.distributed import gpus
from jddp.distributed.gpus import FLAG, add_flag, lacks_atomics

OTHER = "--xla_backend_extra_options=-another"


@pytest.mark.parametrize(
    "jaxlib, environ, num_gpus, flags",
    [
        ("0.10.1", {}, 1, None),
        ("0.10.2", {}, 1, FLAG),
        ("0.10.2.dev20260101", {}, 1, FLAG),
        ("0.11.0", {"XLA_FLAGS": "--a=1"}, 1, f"--a=1 {FLAG}"),
        ("0.11.1", {}, 1, None),
        ("0.12.0.1", {}, 1, None),
        ("0.10.2", {}, 0, None),
        ("0.10.2", {"JAX_PLATFORMS": "cpu"}, 1, None),
        ("0.10.2", {"JAX_PLATFORMS": "cuda"}, 1, FLAG),
        (
            "0.10.2",
            {"XLA_FLAGS": "--xla_backend_extra_options=x"},
            1,
            "--xla_backend_extra_options=x",
        ),
    ],
)
def test_the_flag_is_added_for_versions_that_need_it_unless_it_is_set(
    monkeypatch, jaxlib, environ, num_gpus, flags
):
    monkeypatch.setattr(gpus, "version", lambda package: jaxlib)
    monkeypatch.setattr(gpus, "num_nvidia", lambda: num_gpus)
    add_flag(environ)
    assert environ.get("XLA_FLAGS") == flags
    assert not (flags and lacks_atomics(environ))


SCATTER = """
import dataclasses, sys
import jax, numpy as np
from jddp.workbench.modelled import GPUS, described_mesh
from jddp.workbench.modelled.gpus import target_config

gpu = dataclasses.replace(GPUS["h100_sxm"], compute_capability=(8, 0))
mesh = described_mesh(target_config(gpu), devices_per_host=1)
here = jax.sharding.NamedSharding(mesh, jax.P())
shapes = [((256, 128), np.float32), ((4096,), np.int32), ((4096, 128), np.float32)]
given = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in shapes]
jax.jit(lambda table, rows, grads: table.at[rows].add(grads)).lower(*given).compile()
"""


@pytest.mark.aot
def test_a_scatter_that_adds_float32_has_loops_without_the_flag_and_atomics_with_it(tmp_path):
    def atoms(folder, flags):
        paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        variables = {"XLA_FLAGS": f"--xla_dump_to={folder} {flags}", "PYTHONPATH": paths}
        command = [sys.executable, "-c", SCATTER]
        done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        text = "".join(path.read_text() for path in folder.glob("*.ptx"))
        return set(re.findall(r"\b(?:atom|red)\.[\w.]*\.(cas\.b32|add\.f32)\b", text))

    assert atoms(tmp_path / "with", FLAG) == {"add.f32"}
    without = "cas.b32" if lacks_atomics({}) else "add.f32"
    assert atoms(tmp_path / "without", "") == {without}
