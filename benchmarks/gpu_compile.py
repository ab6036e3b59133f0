"""Compiles the programs of `gpu.py` for a GPU that is only described, and prints the results."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from gpu_crew import one_line
from gpu_jax import lower
from gpu_jobs import JOBS, Job, runs

from jddp.inspection.hlo import collectives, read_program
from jddp.workbench.described import GPUS, described_mesh
from jddp.workbench.links import Fabric
from jddp.workbench.schedule import walk

NUM_DEVICES = {"by_hand": 1, "jddp": 1, "jddp_of_8": 8, "jddp_sync_of_8": 8}


def compile_all(names: list[str], target: str, sizes: dict[str, str]) -> None:
    """Prints a row for each program, and a line of JSON; `sizes` are arguments of the models.

    TFLOP are those of the compiled products and convolutions, where one of 32 bits counts twice;
    modelled is the time that the schedule takes at the rates of `GPUS["h100_sxm"]`. Attention is
    XLA's: cuDNN's asks for a GPU.
    """
    gpu = target if target in GPUS else json.loads(Path(target).read_text())["target_description"]
    print(
        f"{'':10} {'':14} {'arguments':>10} {'temporary':>10} {'TFLOP':>7} {'formula':>7} "
        f"{'exchanges':>9} {'large':>5} {'modelled':>9}"
    )
    results: dict[str, dict[str, dict[str, Any]]] = {}
    words = {name: {"true": True, "false": False}.get(x, x) for name, x in sizes.items()}
    for name in names:
        job = replace(JOBS[name], sizes=JOBS[name].sizes | words)
        for contender, num_devices in NUM_DEVICES.items():
            if not runs(contender, job):
                continue
            results.setdefault(name, {})[contender] = row = {}
            try:
                row |= compile_one(name, contender, gpu, num_devices, job)
            except jax.errors.JaxRuntimeError as error:  # of XLA, which runs no kernels to choose
                row["failure"] = one_line(str(error))
                print(f"{name:10} {contender:14} {row['failure']}", flush=True)
                continue
            print(
                f"{name:10} {contender:14} {row['argument_bytes'] / 2**30:6.2f} GiB "
                f"{row['temporary_bytes'] / 2**30:6.2f} GiB {row['flops'] / 1e12:7.2f} "
                f"{row['formula_flops'] / 1e12:7.2f} {row['exchanges']:9} {row['large']:5} "
                f"{row['modelled_seconds'] * 1e3:6.1f} ms",
                flush=True,
            )
    print(json.dumps({"jax": jax.__version__, "target": target, "results": results}))


def compile_one(
    name: str, contender: str, gpu: str, num_devices: int, job: Job | None = None
) -> dict[str, float]:
    """What one program needs and does on each device; of a job in place of the one of that name."""
    job = job or JOBS[name]
    mesh = described_mesh(gpu, devices_per_host=num_devices)
    compiled = lower(job, contender, mesh).compile()
    memory, program = compiled.memory_analysis(), read_program(compiled.as_text())
    fabric = Fabric(1, num_devices, GPUS["h100_sxm"].links)
    timeline = walk(program, GPUS["h100_sxm"], fabric)
    # Where an operation takes a second and nothing else takes any, seconds are operations.
    rates = {"product_flops": 1.0, "convolution_flops": 1.0, "bytes_per_second": math.inf}
    counting = replace(GPUS["h100_sxm"], kernel_seconds=0.0, **rates)
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": walk(program, counting, fabric).compute_seconds,
        "formula_flops": job.flops_per_row() * job.rows,
        "exchanges": len(collectives(program)),
        "large": len(timeline.large),
        "modelled_seconds": timeline.step_seconds,
    }
