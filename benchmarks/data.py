"""Times what batches go through, as ratios in one run.

    JAX_PLATFORMS=cpu python benchmarks/data.py
    JAX_PLATFORMS=cpu python benchmarks/data.py --only order images

    pipeline  examples a second of the default job's pipeline / those that its step consumes
    loader    a step fed by the loader / a step fed with slices of arrays, `noise`: slices again
    order     the first batch of 1e9 examples: milliseconds, and what it allocates
    images    decoding of JPEG files / a bare loop over Pillow, and the rate of workers / of one

Contenders take turns; a ratio is the median over the rounds. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from step_time import machine

Turn = Callable[[], float]  # Returns seconds.


def ratios(candidate: Turn, reference: Turn, num_rounds: int) -> float:
    """Median over the rounds of candidate / reference."""
    candidate(), reference()
    found = []
    for number in range(num_rounds):
        order = (candidate, reference) if number % 2 else (reference, candidate)
        seconds = {turn: turn() for turn in order}
        found.append(seconds[candidate] / seconds[reference])
    return statistics.median(found)


def timed(act: Callable[[], Any]) -> Turn:
    def turn() -> float:
        since = time.perf_counter()
        act()
        return time.perf_counter() - since

    return turn


def default_job() -> Any:
    from jddp.config.files import load_config
    from jddp.trainer.job.build import build

    return build(load_config()[0])


def stepping(ddp: Any, batches: Callable[[], Iterator[Any]], example: Any) -> Turn:
    """Takes steps over batches, the state kept from turn to turn."""
    import jax

    state = ddp.init(0, example)

    def turn() -> float:
        nonlocal state
        since, num_steps = time.perf_counter(), 0
        for batch in batches():
            state, metrics = ddp.step(state, batch)
            num_steps += 1
        jax.block_until_ready(metrics)
        return (time.perf_counter() - since) / num_steps

    return turn


def pipeline(num_rounds: int) -> dict[str, float]:
    job = default_job()
    batches, size = job.train_batches(), job.config.data.global_batch_size
    example = batches.batch(0)
    rows = job.ddp.shard_batch(example)
    step = stepping(job.ddp, lambda: iter([rows] * 20), example)
    read = timed(lambda: [next(batches) for _ in range(20)])
    step(), read()
    seconds = [(step(), read() / 20) for _ in range(num_rounds)]
    by_step, by_read = (statistics.median(x) for x in zip(*seconds, strict=True))
    return {
        "step_examples_per_second": size / by_step,
        "pipeline_examples_per_second": size / by_read,
        "pipeline_over_step": by_step / by_read,
    }


def loader(num_rounds: int, num_steps: int = 30) -> dict[str, float]:
    from jddp.trainer.prefetch import Source

    job = default_job()
    size, batches = job.config.data.global_batch_size, job.train_batches()
    whole = job.data.train.take(np.arange(size * 8))
    example = {name: x[:size] for name, x in whole.items()}
    example |= {name: x for name, x in batches.batch(0).items() if name not in example}

    def loaded() -> Iterator[Any]:
        source = Source(batches, job.ddp.shard_batch)
        source.start(num_steps)
        for _ in range(num_steps):
            yield next(source)
        source.close()

    def sliced() -> Iterator[Any]:
        for i in range(num_steps):
            rows = slice(i % 8 * size, (i % 8 + 1) * size)
            yield job.ddp.shard_batch(example | {name: x[rows] for name, x in whole.items()})

    turns = [stepping(job.ddp, x, example) for x in (loaded, sliced, sliced)]
    return {
        "loader_over_slices": ratios(turns[0], turns[1], num_rounds),
        "noise": ratios(turns[2], turns[1], num_rounds),
    }


class Numbers:
    """A billion examples that are their indices."""

    def __len__(self) -> int:
        return 10**9

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The indices."""
        return {"x": indices}


def order(num_rounds: int) -> dict[str, float]:
    from jddp.data import TrainBatches

    def first() -> None:
        next(TrainBatches(Numbers(), global_batch_size=1024, seed=next(seeds)))

    seeds = iter(range(10**6))
    turn = timed(first)
    milliseconds = 1e3 * statistics.median(turn() for _ in range(num_rounds))
    tracemalloc.start()
    first()
    _, peak = tracemalloc.get_traced_memory()
    return {"first_batch_ms": milliseconds, "peak_kib": peak / 1024}


def images(num_rounds: int, num_files: int = 600, pixels: int = 224) -> dict[str, float]:
    from PIL import Image

    from jddp.data.sources.images import FolderExamples
    from jddp.data.transforms import Normalize, Transformed

    with tempfile.TemporaryDirectory() as folder:
        rng, root = np.random.default_rng(0), Path(folder)
        (root / "class").mkdir()
        for number in range(num_files):
            image = Image.fromarray(photo_like(rng))
            image.save(root / "class" / f"{number}.jpg", quality=90)
        files = [f"class/{number}.jpg" for number in range(num_files)]
        labels = np.zeros(num_files, np.int32)
        examples = FolderExamples(root, ["class"], files, labels, image_size=pixels)
        paths, some = [root / name for name in files], range(200)

        def by_pillow() -> None:
            for index in some:
                with Image.open(paths[index]) as file:
                    np.asarray(file.convert("RGB").resize((pixels, pixels)))

        def by_jddp() -> None:
            for index in some:
                examples.take(np.array([index]))

        found = {"decode_over_pillow": ratios(timed(by_jddp), timed(by_pillow), num_rounds)}
        scaled = Transformed(examples, Normalize(0.5, 0.25))
        for place, on_device in (("host", False), ("device", True)):
            for num_workers in (0, 1, 2):
                rate, num_bytes = reading(scaled, num_workers, on_device=on_device)
                found[f"examples_per_second_{place}_{num_workers}_workers"] = rate
            found[f"bytes_per_image_{place}"] = num_bytes
        return found


def photo_like(rng: np.random.Generator, shape: tuple[int, int] = (375, 500)) -> np.ndarray:
    """An image with detail of every size, as photographs have: 1 / f noise."""
    height, width = shape
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    noise = np.fft.rfft2(rng.normal(size=(3, height, width))) / np.maximum(frequency, 1 / width)
    pixels = np.fft.irfft2(noise, (height, width))
    scaled = 128 + 50 * pixels / pixels.std((1, 2), keepdims=True)
    return np.clip(scaled, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def reading(examples: Any, num_workers: int, *, on_device: bool) -> tuple[float, float]:
    """Augmented examples a second, once the workers have started; and the bytes of an image.

    With `on_device` the rows are only read here: the step transforms them.
    """
    from jddp.data import TrainBatches, WorkerBatches
    from jddp.data.transforms import CropAndFlip

    plan = {"global_batch_size": 50, "seed": 0, "transforms": [CropAndFlip()]}
    batches = TrainBatches(examples, on_device=on_device, **plan)
    if num_workers:
        batches = WorkerBatches(batches, num_workers=num_workers)
    for _ in range(4 * max(1, num_workers)):
        batch = next(batches)
    since = time.perf_counter()
    for _ in range(40):
        next(batches)
    rate = 40 * 50 / (time.perf_counter() - since)
    if num_workers:
        batches.close()
    return rate, batch["image"].nbytes / 50


SECTIONS = {"pipeline": pipeline, "loader": loader, "order": order, "images": images}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    found = {name: SECTIONS[name](arguments.rounds) for name in arguments.only}
    for name, values in found.items():
        for what, value in values.items():
            print(f"{name:10} {what:32} {value:12,.3f}")
    print(json.dumps({**machine(), "results": found}))


if __name__ == "__main__":
    main()
