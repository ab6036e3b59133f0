"""Counts the all-reduces of the compiled step, for several bucket sizes and both layouts.

    python benchmarks/collectives.py

Nothing is trained: the default job's step is compiled, and its program read. Beside the gradients,
the program holds two all-reduces a batch norm (its statistics, forward and backward) and one small
vector of loss and metrics.
"""

import itertools

import jax
import numpy as np
import optax

import jddp
from jddp.inspection.hlo import collectives, read_program
from jddp.zoo.losses import cross_entropy
from jddp.zoo.models import CNN

NUM_DEVICES = 8


def main() -> None:
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    batch = {
        "image": jax.ShapeDtypeStruct((128, 28, 28, 1), np.float32),
        "label": jax.ShapeDtypeStruct((128,), np.int32),
    }
    print(f"{'bucket_mb':>9} {'layout':>6} {'buckets':>7} {'all-reduces':>11}  elements of each")
    for bucket_mb, layout in itertools.product((0.1, 1, 25), ("leaf", "flat")):
        options = {"reduction": jddp.Reduction(bucket_mb=bucket_mb, layout=layout)}
        ddp = jddp.DataParallel(CNN(), optax.adamw(1e-3), cross_entropy, **options)
        program = read_program(ddp.steps.lower(batch).compile().as_text())
        sizes = [found.num_elements for found in collectives(program)]
        plan = ddp.steps.planned(batch).plan
        print(f"{bucket_mb:9} {layout:>6} {len(plan):7} {len(sizes):11}  {sizes}")


if __name__ == "__main__":
    main()
