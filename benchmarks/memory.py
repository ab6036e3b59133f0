"""Compares the peak memory of a step with that of the same step by hand, averaged leaf by leaf.

    python benchmarks/memory.py mlp cnn gpt

Read from the compiled programs, for one of eight virtual CPU devices: arguments, results and
temporaries, less what shares memory. A section of `reduce`.
"""

import sys
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402  # The number of devices comes first.
import optax  # noqa: E402
from step_time import (  # noqa: E402
    Job,
    cnn_job,
    first_state,
    gpt_job,
    loss_fn,
    mean_loss_and_accuracy,
)

import jddp  # noqa: E402
from jddp.zoo.models import MLP  # noqa: E402
from peers import shard_map_trainer  # noqa: E402


def mlp_job() -> Job:
    model, rng = MLP((1024, 1024, 1024), 10), np.random.default_rng(0)
    inputs = rng.standard_normal((64, 784), dtype=np.float32)
    batch = {"inputs": inputs, "targets": rng.integers(10, size=64, dtype=np.int32)}
    return Job(model, lambda axis: model, batch, optax.sgd(0.01, momentum=0.9), 8)


JOBS = {"mlp": mlp_job, "cnn": cnn_job, "gpt": gpt_job}


def peak(compiled: Any) -> int:
    size = compiled.memory_analysis()
    return (
        size.argument_size_in_bytes
        + size.output_size_in_bytes
        + size.temp_size_in_bytes
        - size.alias_size_in_bytes
    )


def by_hand(job: Job) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    step = shard_map_trainer.make_step(
        job.by_hand("data"), mean_loss_and_accuracy, job.optimizer, mesh
    )
    state = shard_map_trainer.replicate(first_state(job), mesh)
    return step.lower(state, shard_map_trainer.shard(job.batch, mesh)).compile()


def main() -> None:
    print("memory  layout             peak / by hand    goal <= 1.05")
    for name in (name for name in JOBS if name in (sys.argv[1:] or JOBS)):
        job = JOBS[name]()
        reference = peak(by_hand(job))
        for layout in ("auto", "leaf", "flat"):
            ddp = jddp.DataParallel(
                job.model, job.optimizer, loss_fn, reduction=jddp.Reduction(layout=layout)
            )
            found = peak(ddp.steps.lower(job.batch).compile())
            print(f"{name:<8}{layout:<6} {found:>12,} bytes {found / reference:>9.3f}")


if __name__ == "__main__":
    main()
