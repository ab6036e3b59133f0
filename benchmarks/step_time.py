"""Times a step of jddp against the same step by hand, as ratios in one run.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --only cnn loop --rounds 50

Contestants take turns within each round, and the order turns too, so that other load of the machine
affects them equally. A ratio is the median over the rounds of candidate / reference; `noise` is the
same for a second copy of the reference, compiled again: a ratio that is off 1 by no more than that
is within the noise.

    cnn       ddp.step / jit(shard_map) by hand, the default job's network
    gpt       the same, a small GPT
    trivial   the same, a model of one number: the cost of the call itself
    pmap      ddp.step / a pmap step by hand, the default job's network
    nnx       ddp.step of the default job's network in NNX / the same in Linen
    loop      jddp.fit with its reports / a bare loop over ddp.step, on the same host batches
"""

import argparse
import contextlib
import dataclasses
import datetime
import io
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jddp
from jddp.zoo.models import CNN, CNN_NNX, GPT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from peers import pmap_trainer, shard_map_trainer
from peers.convnet import ConvNet

Turn = Callable[[], float]  # Takes a few steps; returns seconds per step.


@dataclass(frozen=True)
class Job:
    """A model to train, as jddp is given it and as a step by hand is.

    Attributes:
      model: Written without an axis name.
      by_hand: Returns the same model for a mapped axis of that name.
      batch: Host arrays, "inputs" and "targets".
      optimizer: Any of optax.
      num_steps: Steps in a turn.
    """

    model: nn.Module | nnx.Module
    by_hand: Callable[[str], nn.Module]
    batch: dict[str, np.ndarray]
    optimizer: optax.GradientTransformation
    num_steps: int


class Trivial(nn.Module):
    """Logits that are one learned number away from the inputs."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns `x` plus the number."""
        return x + self.param("number", nn.initializers.zeros, (1, 1))


def cnn_job() -> Job:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((128, 28, 28, 1), dtype=np.float32)
    batch = {"inputs": images, "targets": rng.integers(10, size=128, dtype=np.int32)}
    return Job(CNN(), lambda axis: ConvNet(axis_name=axis), batch, optax.adamw(1e-3), 4)


def cnn_nnx_job() -> Job:
    return dataclasses.replace(cnn_job(), model=CNN_NNX(rngs=nnx.Rngs(0)))


def gpt_job() -> Job:
    tokens = np.random.default_rng(0).integers(256, size=(16, 65), dtype=np.int32)
    model = GPT(num_layers=2, num_heads=4, width=128, max_length=64)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    return Job(model, lambda axis: model, batch, optax.adamw(1e-3), 4)


def trivial_job() -> Job:
    batch = {"inputs": np.zeros((8, 2), np.float32), "targets": np.zeros(8, np.int32)}
    return Job(Trivial(), lambda axis: Trivial(), batch, optax.sgd(1e-3), 200)


def loss_fn(model: Any, batch: Any, train: bool) -> Any:
    mode = {"train": train} if isinstance(model, nn.Module) else {}
    logits = model(batch["inputs"], **mode)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses, {"accuracy": logits.argmax(-1) == batch["targets"]}


def mean_loss_and_accuracy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), (logits.argmax(-1) == targets).mean()


def by_jddp(job: Job) -> Turn:
    ddp = jddp.DataParallel(job.model, job.optimizer, loss_fn)
    state = ddp.init(seed=0, batch=job.batch)
    return stepping(ddp.step, state, ddp.shard_batch(job.batch), job.num_steps)


def by_hand(job: Job) -> Turn:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    step = shard_map_trainer.make_step(
        job.by_hand("data"), mean_loss_and_accuracy, job.optimizer, mesh
    )
    state = shard_map_trainer.replicate(first_state(job), mesh)
    return stepping(step, state, shard_map_trainer.shard(job.batch, mesh), job.num_steps)


def by_pmap(job: Job) -> Turn:
    step = pmap_trainer.make_step(job.by_hand("batch"), mean_loss_and_accuracy, job.optimizer)
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()), ("batch",)), jax.P("batch")
    )
    state = jax.device_put(pmap_trainer.replicate(first_state(job)), sharding)
    batch = jax.device_put(pmap_trainer.shard(job.batch), sharding)
    return stepping(step, state, batch, job.num_steps)


def first_state(job: Job) -> pmap_trainer.State:
    variables = job.model.init(jax.random.key(0), job.batch["inputs"][:1], train=False)
    params = variables.pop("params")
    return pmap_trainer.State(params, variables, job.optimizer.init(params))


def stepping(step: Callable[..., Any], state: Any, batch: Any, num_steps: int) -> Turn:
    """Returns a turn of `num_steps` calls, each waiting for the one before, as a trainer does."""

    def turn() -> float:
        nonlocal state
        started, waiting = time.perf_counter(), None
        for _ in range(num_steps):
            state, metrics = step(state, batch)
            jax.block_until_ready(waiting)
            waiting = metrics["loss"]
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / num_steps

    return turn


class Stopwatch:
    """The same host batches again and again, with the times at which they were asked for."""

    WARM_UP = 6

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        order = np.random.default_rng(0)
        self._batches = [
            {name: x[order.permutation(len(x))] for name, x in batch.items()} for _ in range(8)
        ]
        self._asked: list[float] = []

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Starts again."""
        self._asked = []
        for batch in itertools.cycle(self._batches):
            self._asked.append(time.perf_counter())
            yield batch

    def seconds_per_step(self) -> float:
        """Between requests, once the loop is under way."""
        asked = self._asked[self.WARM_UP :]
        return (asked[-1] - asked[0]) / (len(asked) - 1)


def looping(job: Job, *, in_fit: bool) -> Turn:
    """Returns a turn of 24 steps, by `jddp.fit` into a run directory or a loop of three lines."""
    ddp = jddp.DataParallel(job.model, job.optimizer, loss_fn)
    state, batches, num_steps = ddp.init(seed=0, batch=job.batch), Stopwatch(job.batch), 24

    def fit() -> float:
        nonlocal state
        with tempfile.TemporaryDirectory() as run_dir, silence():
            options = {"run_dir": run_dir, "log_every_steps": 10, "state": state}
            state = jddp.fit(ddp, batches, num_steps=int(state.step) + num_steps, **options).state
        return batches.seconds_per_step()

    def loop() -> float:
        nonlocal state
        waiting = None
        for batch in itertools.islice(batches, num_steps):
            state, metrics = ddp.step(state, batch)
            jax.block_until_ready(waiting)
            waiting = metrics["loss"]
        jax.block_until_ready(state)
        return batches.seconds_per_step()

    return fit if in_fit else loop


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# Candidate, reference, and the reference's second copy.
COMPARISONS: dict[str, Callable[[], tuple[Turn, Turn, Turn]]] = {
    "cnn": lambda: (by_jddp(cnn_job()), by_hand(cnn_job()), by_hand(cnn_job())),
    "gpt": lambda: (by_jddp(gpt_job()), by_hand(gpt_job()), by_hand(gpt_job())),
    "trivial": lambda: (by_jddp(trivial_job()), by_hand(trivial_job()), by_hand(trivial_job())),
    "pmap": lambda: (by_jddp(cnn_job()), by_pmap(cnn_job()), by_pmap(cnn_job())),
    "nnx": lambda: (by_jddp(cnn_nnx_job()), by_jddp(cnn_job()), by_jddp(cnn_job())),
    "loop": lambda: tuple(looping(cnn_job(), in_fit=in_fit) for in_fit in (True, False, False)),
}


def compare(turns: tuple[Turn, Turn, Turn], num_rounds: int) -> dict[str, float]:
    """Lets the three take turns, and returns medians: milliseconds, ratio, noise, difference."""
    for turn in turns:
        turn()  # Compiles.
    seconds = np.empty((num_rounds, 3))
    for i in range(num_rounds):
        for k in range(3):
            contestant = (i + k) % 3
            seconds[i, contestant] = turns[contestant]()
    candidate, reference, again = seconds.T
    return {
        "candidate_ms": 1e3 * statistics.median(candidate),
        "reference_ms": 1e3 * statistics.median(reference),
        "ratio": statistics.median(candidate / reference),
        "noise": statistics.median(again / reference),
        "difference_us": 1e6 * statistics.median(candidate - reference),
    }


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=30, help="30 by default")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices; 8 by default")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    results = {}
    print(
        f"{'':8} {'candidate':>12} {'reference':>12} {'ratio':>7} {'noise':>7} {'difference':>11}"
    )
    for name in arguments.only:
        row = compare(COMPARISONS[name](), arguments.rounds)
        results[name] = {key: round(value, 4) for key, value in row.items()}
        print(
            f"{name:8} {row['candidate_ms']:9.3f} ms {row['reference_ms']:9.3f} ms "
            f"{row['ratio']:7.3f} {row['noise']:7.3f} {row['difference_us']:8.0f} us",
            flush=True,
        )
    print(json.dumps({**machine(), "rounds": arguments.rounds, "results": results}))


if __name__ == "__main__":
    main()
