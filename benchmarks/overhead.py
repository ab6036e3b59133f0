"""Times what it costs to survive, as ratios in one run.

    JAX_PLATFORMS=cpu python benchmarks/overhead.py
    JAX_PLATFORMS=cpu python benchmarks/overhead.py --only save --rounds 9

    save      a checkpoint of 500 MB: how long the loop waits / a forced copy of every array, and
              digests of files / all else that is done in the background
    restart   seconds from the start of the default job, which was killed, to its next finished
              step; what it compiles has been compiled before
    watching  the default job's step in `fit` (signals, watchdog, each loss looked at) / in a loop
              that does nothing else; the same with steps skipped that are not finite, and with a
              dynamic loss scale; and a comparison of all replicas / the 500 steps between two of
              them
    memory    the default job's step in `fit` with the newest state in the memory of the host, as
              often as by default / without
    replay    the default job in `fit` on two devices, with every tenth step replayed: the time of
              the two steps around a replay, less the time of two others / a step
    reports   the default job's step in `fit` with a record of each step, in a file, and with
              TensorBoard as a sink / without records; and what is added, for one record in fifty
              steps, which is the default
    program   digests of the default job's model, loss and optimizer, which a run takes once at its
              start, of traces that the step needs anyway: seconds, and seconds of this process
    opened    a run that is opened again: evaluation and prediction on its test data / a bare loop
              over `ddp.evaluate` and `ddp.predict`, after the first call of each
    leaves    the first step of models of 100, 400 and 1,200 scalars, traced and compiled: `init`
              and `step`, and `fit`, in seconds of this process / plain `jit` of both, with the
              batch split over the same devices

    digest    the digests by which replicas are compared, for ResNet-50 with SGD and momentum:
              traced and compiled, which a start without a cache waits for, in seconds of this
              process / operations of its own for each leaf, as XLA compiles by default

Contenders take turns; a ratio is the median over the rounds. The last line is JSON.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from step_time import machine


def seconds_of(act: Callable[[], Any]) -> float:
    since = time.perf_counter()
    act()
    return time.perf_counter() - since


def made_state(num_megabytes: int) -> Any:
    """A state of twenty-five arrays of random numbers, replicated over one device."""
    import jax

    from jddp.engine.mesh import make_mesh, replicate
    from jddp.engine.state import TrainState

    rng = np.random.default_rng(0)
    size = num_megabytes * 10**6 // 4 // 25
    arrays = {f"array {i}": rng.normal(size=size).astype(np.float32) for i in range(25)}
    step, key = np.int32(0), jax.random.key(0)
    state = TrainState(step, arrays, None, {}, (), (), step, key)
    return replicate(state, make_mesh(1))


def save(num_rounds: int, num_megabytes: int = 500) -> dict[str, float]:
    import jax

    from jddp.checkpoint.checkpoints import CheckpointFolder
    from jddp.checkpoint.folders import find_damage
    from jddp.engine.digest import digests

    state = made_state(num_megabytes)
    names = ("copy", "blocking", "background", "files", "arrays")
    found: dict[str, list[float]] = {name: [] for name in names}
    folder = Path(tempfile.mkdtemp())
    checkpoints = CheckpointFolder(folder, keep=1)
    for step in range(num_rounds + 1):
        copy = seconds_of(lambda: jax.tree.map(force_copy, state))
        blocking = seconds_of(lambda step=step: checkpoints.save(step, state, {}))
        background = seconds_of(checkpoints.wait)
        files = seconds_of(lambda step=step: find_damage(folder / str(step)))
        arrays = seconds_of(lambda: jax.block_until_ready(digests(state)))
        if step:  # the first compiles
            values = (copy, blocking, background, files, arrays)
            for name, value in zip(names, values, strict=True):
                found[name].append(value)
    checkpoints.close()
    shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "blocking seconds": medians["blocking"],
        "copy seconds": medians["copy"],
        "blocking / (1.2 copies + 50 ms)": statistics.median(
            b / (1.2 * c + 0.05) for b, c in zip(found["blocking"], found["copy"], strict=True)
        ),
        "background seconds": medians["background"],
        "digests of files / all else in the background": statistics.median(
            f / (b - f) for f, b in zip(found["files"], found["background"], strict=True)
        ),
        "digests of arrays, on the device, in seconds": medians["arrays"],
    }


def force_copy(x: Any) -> Any:
    import jax

    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x, copy=True)


def restart(num_rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jddp.train", f"run.dir={folder}/run"]
        command += ["train.log_every_steps=1", "checkpoint.every_steps=10"]
        metrics, seconds = Path(folder, "run", "metrics.jsonl"), []
        for number in range(num_rounds + 1):
            saved = Path(folder, "run", "checkpoints")
            step = max((int(p.name) for p in saved.glob("*") if p.name.isdecimal()), default=0)
            metrics.unlink(
                missing_ok=True
            )  # what an earlier life wrote would be taken for this one's
            since = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            wait_until(lambda step=step: last_step(metrics) > step)
            if number:  # the first compiles
                seconds.append(time.perf_counter() - since)
            wait_until(lambda step=step: last_step(metrics) > step + 25)
            process.send_signal(signal.SIGKILL)
            process.wait()
    return {"seconds to the next step": statistics.median(seconds), "longest": max(seconds)}


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def watching(num_rounds: int, num_steps: int = 50) -> dict[str, float]:
    from jddp.engine.digest import digests, find_divergence

    plain, skipping = (default_job({"ddp.skip_nonfinite": skip}) for skip in (False, True))
    scaling = default_job({"ddp.precision.loss_scale": "dynamic"})
    batch = plain.shard_batch(first_batch())
    names = ("bare", "fit", "skipping", "scaling", "digest")
    found: dict[str, list[float]] = {name: [] for name in names}
    state = plain.init(0, first_batch())
    for number in range(num_rounds + 1):
        values = {
            "bare": bare_loop(plain, batch, num_steps),
            "fit": fitted(plain, batch, num_steps),
            "skipping": fitted(skipping, batch, num_steps),
            "scaling": fitted(scaling, batch, num_steps),
            "digest": seconds_of(lambda: find_divergence(digests(state), state)),
        }
        if number:  # the first compiles
            for name, value in values.items():
                found[name].append(value)

    def median_ratio(of: str, to: str, times: int = 1) -> float:
        pairs = zip(found[of], found[to], strict=True)
        return statistics.median(a / (b * times) for a, b in pairs)

    return {
        "seconds of a bare step": statistics.median(found["bare"]),
        "fit / bare": median_ratio("fit", "bare"),
        "fit that skips what is not finite / bare": median_ratio("skipping", "bare"),
        "fit with a dynamic loss scale / bare": median_ratio("scaling", "bare"),
        "a dynamic loss scale / skipping alone": median_ratio("scaling", "skipping"),
        "seconds of a comparison": statistics.median(found["digest"]),
        "a comparison / 500 steps": median_ratio("digest", "bare", 500),
    }


def memory(num_rounds: int, num_steps: int = 100) -> dict[str, float]:
    import jddp

    ddp = default_job({})
    batch = ddp.shard_batch(first_batch())
    found: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(num_rounds + 1):
        contenders = [("without", 0), ("with", None)]
        for name, every in contenders[:: (-1) ** number]:
            with tempfile.TemporaryDirectory() as folder:
                keep = jddp.Keep(memory_every_steps=every)
                seconds = fitted(ddp, batch, num_steps, run_dir=folder, keep=keep)
            if number:  # the first compiles
                found[name].append(seconds)
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    return {
        "seconds of a step without states in memory": statistics.median(found["without"]),
        "with / without": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def replay(num_rounds: int) -> dict[str, float]:
    ddp = default_job({"mesh.num_devices": 2})
    batch = ddp.shard_batch(first_batch())
    clocks = {"time": time.perf_counter, "time of this process": time.process_time}
    added: dict[str, list[float]] = {name: [] for name in clocks}
    for number in range(num_rounds + 1):
        for name, clock in clocks.items():
            found = added_by_replays(ddp, batch, clock)
            added[name] += found if number else []  # the first compiles
    return {f"{name} that a replay adds / a step": statistics.median(added[name]) for name in added}


def added_by_replays(
    ddp: Any, batch: Any, clock: Callable[[], float], num_steps: int = 100, every: int = 10
) -> list[float]:
    import jddp

    checks = jddp.Checks(replicas_every_steps=None, replay_every_steps=every)
    at = moments(ddp, batch, num_steps, clock, checks=checks)
    added = []
    # A callback sees a step when the next one is sent, and a replay waits for both.
    for step in range(every, num_steps, every):
        replayed, plain = (at[x] - at[x - 2] for x in (step, step + every // 2))
        added.append((replayed - plain) / (plain / 2))
    return added


def default_job(overrides: dict[str, Any]) -> Any:
    from jddp.config.files import load_config
    from jddp.trainer.job.build import build

    return build(load_config([], overrides)[0]).ddp


def first_batch() -> Any:
    from jddp.config.files import load_config
    from jddp.trainer.job.build import build

    return build(load_config([], {})[0]).train_batches().batch(0)


def bare_loop(ddp: Any, batch: Any, num_steps: int) -> float:
    """Seconds a step, each loss read after the next step has been sent."""
    state, metrics = ddp.step(ddp.init(0, batch), batch)
    waiting, since = metrics, time.perf_counter()
    for _ in range(num_steps):
        state, metrics = ddp.step(state, batch)
        float(waiting["loss"])
        waiting = metrics
    return (time.perf_counter() - since) / num_steps


def fitted(ddp: Any, batch: Any, num_steps: int, **options: Any) -> float:
    """Seconds a step in `fit`, between the same two moments."""
    at = moments(ddp, batch, num_steps, time.perf_counter, **options)
    return (at[num_steps + 1] - at[1]) / num_steps


def moments(
    ddp: Any, batch: Any, num_steps: int, clock: Callable[[], float], **options: Any
) -> dict[int, float]:
    """The moments after each step in `fit`, by a clock."""
    import jddp

    at: dict[int, float] = {}

    class Moments(jddp.Callback):
        def on_step(self, run: Any, metrics: Any) -> None:
            at[metrics["step"]] = clock()

    plan = {"num_steps": num_steps + 2, "callbacks": [Moments()], **options}
    with contextlib.redirect_stdout(io.StringIO()):
        jddp.fit(ddp, itertools.repeat(batch), **plan)
    return at


def reports(num_rounds: int, num_steps: int = 50) -> dict[str, float]:
    ddp = default_job({})
    batch = ddp.shard_batch(first_batch())
    found: dict[str, list[float]] = {name: [] for name in ("silent", "kept", "TensorBoard")}
    for number in range(num_rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            kept = {"run_dir": f"{folder}/kept", "log_every_steps": 1}
            shown = {"run_dir": f"{folder}/shown", "log_every_steps": 1, "sinks": ["tensorboard"]}
            values = {
                "silent": fitted(ddp, batch, num_steps, log_every_steps=10**9),
                "kept": fitted(ddp, batch, num_steps, **kept),
                "TensorBoard": fitted(ddp, batch, num_steps, **shown),
            }
        if number:  # the first compiles
            for name, value in values.items():
                found[name].append(value)
    ratios = {
        name: statistics.median(a / b for a, b in zip(found[name], found["silent"], strict=True))
        for name in ("kept", "TensorBoard")
    }
    return {
        "seconds of a step without records": statistics.median(found["silent"]),
        "records in a file / without records": ratios["kept"],
        "and in TensorBoard / without records": ratios["TensorBoard"],
        "share of one record in 50 steps": (ratios["TensorBoard"] - 1) / 50,
    }


def opened(num_rounds: int) -> dict[str, float]:
    import jddp
    from jddp.config.files import load_config
    from jddp.trainer.job.build import build, test_batches

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        overrides = {"run.dir": f"{folder}/run", "train.num_steps": 2}
        job = build(load_config([], overrides)[0])
        ddp, state, again = job.ddp, job.run().state, jddp.open_run(f"{folder}/run")

        def rows() -> Any:
            return test_batches(job.config, job.data)

        acts: dict[str, Callable[[], Any]] = {
            "bare evaluation": lambda: ddp.evaluate(state, rows()),
            "evaluation": again.evaluate,
            "bare prediction": lambda: ddp.predict(state, rows()),
            "prediction": again.predict,
        }
        # The first round compiles, and reads the data.
        rounds = [{n: seconds_of(act) for n, act in acts.items()} for _ in range(num_rounds + 1)]
    found = rounds[1:]
    ratios = {
        f"{name} / bare": statistics.median(x[name] / x[f"bare {name}"] for x in found)
        for name in ("evaluation", "prediction")
    }
    medians = {f"{name}, seconds": statistics.median(x[name] for x in found) for name in acts}
    return {**ratios, **medians}


def program(num_rounds: int) -> dict[str, float]:
    from jddp.config.versions import source_hash

    ddp, batch = default_job({}), first_batch()
    state = ddp.init(0, batch)
    ddp.steps.trace(batch)  # which the first step does
    found = []
    for _ in range(num_rounds):
        since = time.process_time()
        seconds = seconds_of(lambda: (ddp.steps.program(state, batch), source_hash()))
        found.append((seconds, time.process_time() - since))
    return {
        "seconds": statistics.median(x for x, _ in found),
        "seconds of this process": statistics.median(x for _, x in found),
    }


def digest(num_rounds: int) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import optax

    import jddp
    from jddp.engine.digest import _digest, _on
    from jddp.engine.mesh import make_mesh
    from jddp.zoo.losses import cross_entropy
    from jddp.zoo.models import resnet50

    mesh = make_mesh(1)
    ddp = jddp.DataParallel(resnet50(), optax.sgd(0.1, momentum=0.9), cross_entropy, mesh=mesh)
    batch = {"image": np.zeros((1, 224, 224, 3), np.float32), "label": np.zeros(1, np.int32)}
    leaves = jax.tree.leaves(ddp.steps.abstract_state(batch))

    def alone(leaves: Any) -> Any:
        return jnp.stack([_digest.__wrapped__(x, 0) for x in leaves])

    def compiled(function: Any) -> float:
        jax.clear_caches()
        since = time.process_time()
        function().lower(leaves).compile()
        return time.process_time() - since

    layout = (jax.P(),) * len(leaves)
    acts = {"alone": lambda: jax.jit(alone), "ours": lambda: _on.__wrapped__(mesh, layout)}
    found = [{name: compiled(act) for name, act in acts.items()} for _ in range(num_rounds)]
    return {
        "leaves": len(leaves),
        "shapes": len({(x.shape, x.dtype) for x in leaves}),
        "seconds": statistics.median(x["ours"] for x in found),
        "seconds, each leaf alone": statistics.median(x["alone"] for x in found),
        "ratio": statistics.median(x["ours"] / x["alone"] for x in found),
    }


def leaves(num_rounds: int, nums: tuple[int, ...] = (100, 400, 1200)) -> dict[str, float]:
    import jax

    found: dict[str, float] = {}
    for act in first_steps(2).values():  # which imports
        act()
    for num in nums:
        acts = first_steps(num)
        seconds: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(num_rounds):
            for name, act in acts.items():
                jax.clear_caches()
                since = time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    jax.block_until_ready(act())
                seconds[name].append(time.process_time() - since)
        found[f"{num} leaves: plain seconds"] = statistics.median(seconds["plain"])
        for name in ("step", "fit"):
            pairs = zip(seconds[name], seconds["plain"], strict=True)
            found[f"{num} leaves: {name} / plain"] = statistics.median(a / b for a, b in pairs)
    return found


def first_steps(num: int) -> dict[str, Callable[[], Any]]:
    """Functions that trace, compile and take the first step of a model of scalars."""
    import jax
    import optax
    from flax import linen as nn

    import jddp

    class Scalars(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return sum(self.param(f"s{i}", nn.initializers.ones, ()) * x for i in range(num))

    def loss_fn(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]) ** 2

    model, tx = Scalars(), optax.adam(1e-3)
    batch = {name: np.ones(8, np.float32) for name in "xy"}

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    everywhere, by_rows = (
        jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",))
    )

    def plain() -> Any:
        @functools.partial(jax.jit, out_shardings=everywhere)
        def init(x: Any) -> Any:
            params = model.init(jax.random.key(0), x)
            return params, tx.init(params)

        @jax.jit
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            def loss(params: Any) -> Any:
                return loss_fn(lambda x: model.apply(params, x), batch).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step(*init(batch["x"]), jax.device_put(batch, by_rows))

    def replicated() -> Any:
        ddp = jddp.DataParallel(model, tx, loss_fn)
        return ddp.step(ddp.init(0, batch), batch)

    def fitted() -> Any:
        return jddp.fit(jddp.DataParallel(model, tx, loss_fn), [batch], num_steps=1).state

    return {"plain": plain, "step": replicated, "fit": fitted}


PARTS = {
    "leaves": leaves,
    "save": save,
    "restart": restart,
    "watching": watching,
    "memory": memory,
    "replay": replay,
    "reports": reports,
    "program": program,
    "opened": opened,
    "digest": digest,
}


def print_figures(parts: dict[str, Callable[[int], dict[str, float]]], description: str) -> None:
    """Runs the parts that the command line names; prints a row for each figure, and JSON."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.only:
        found[name] = parts[name](arguments.rounds)
        for what, value in found[name].items():
            print(f"{name:8} {what:48} {value:9.3g}", flush=True)
    print(json.dumps({**machine(), "results": found}))


if __name__ == "__main__":
    print_figures(PARTS, __doc__.splitlines()[0])
