"""Times one thread that reads the same examples from files of each format, in random order.

    JAX_PLATFORMS=cpu python benchmarks/formats.py --rounds 9

    images    pictures of 224 x 224 pixels: bytes in arrays, JPEG elsewhere
    rows      64 numbers and a label
    tokens    windows of 256 tokens

Formats take turns; a ratio to npz is the median over the rounds. The last line is JSON.
"""

import argparse
import io
import json
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow.csv
from data import machine, photo_like
from PIL import Image

from jddp.data import TrainBatches, make_source

BATCH, NUM_IMAGES, NUM_ROWS, NUM_WINDOWS = 64, 256, 20_000, 5_000
PIXELS, NUMBERS, LENGTH = 224, 64, 256

Arrays = dict[str, np.ndarray]
Made = dict[str, dict[str, object]]  # data.kwargs, by data.name


def write_images(root: Path) -> Made:
    rng = np.random.default_rng(0)
    pixels = np.stack([photo_like(rng, (PIXELS, PIXELS)) for _ in range(NUM_IMAGES)])
    labels = np.arange(NUM_IMAGES, dtype=np.int32) % 10
    files = [jpeg(image) for image in pixels]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int32")})
    stored = {"image": [{"bytes": file} for file in files], "label": labels.tolist()}
    rows = datasets.Dataset.from_dict(stored, features=features)
    for part in ("train", "test"):
        np.savez(folder(root, "npz") / f"{part}.npz", image=pixels, label=labels)
        np.save(folder(root, "npy") / f"{part}_images.npy", pixels)
        np.save(folder(root, "npy") / f"{part}_labels.npy", labels)
        rows.save_to_disk(folder(root, "hugging_face") / part)
        with tarfile.open(folder(root, "webdataset") / f"{part}.tar", "w") as tar:
            for number, (file, label) in enumerate(zip(files, labels, strict=True)):
                path = folder(root, f"image_folder/{part}/{label}") / f"{number:03}.jpg"
                path.write_bytes(file)
                add(tar, f"{number:03}.jpg", file)
                add(tar, f"{number:03}.cls", str(label).encode())
    of_size = {"image_size": PIXELS}
    return {
        "npz": {},
        "npy": {**of_size, "num_classes": 10},
        "image_folder": of_size,
        "webdataset": of_size,
        "hugging_face": {},
    }


def write_rows(root: Path) -> Made:
    x = np.random.default_rng(0).normal(size=(NUM_ROWS, NUMBERS)).astype(np.float32)
    label = np.arange(NUM_ROWS, dtype=np.int32) % 10
    rows = datasets.Dataset.from_dict({"x": x, "label": label})
    columns = {f"x{number}": column for number, column in enumerate(x.T)}
    for part in ("train", "test"):
        np.savez(folder(root, "npz") / f"{part}.npz", x=x, label=label)
        rows.save_to_disk(folder(root, "hugging_face") / part)
        table = pyarrow.table({**columns, "label": label})
        pyarrow.csv.write_csv(table, folder(root, "table") / f"{part}.csv")
    return {
        "npz": {},
        "hugging_face": {},
        "table": {"inputs": [*columns], "target": "label"},
    }


def write_tokens(root: Path) -> Made:
    tokens = np.random.default_rng(0).integers(0, 50_000, NUM_WINDOWS * LENGTH + 1, np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)[::LENGTH]
    for part in ("train", "test"):
        np.savez(folder(root, "npz") / f"{part}.npz", tokens=windows.astype(np.int32))
        np.save(folder(root, "tokens") / f"{part}.npy", tokens)
    return {"npz": {}, "tokens": {"sequence_length": LENGTH, "vocab_size": 50_000}}


def folder(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True, exist_ok=True)
    return root / name


def jpeg(pixels: np.ndarray) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG", quality=90)
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    tar.addfile(header, io.BytesIO(content))


def batches_of(name: str, directory: Path, kwargs: dict[str, object]) -> Iterator[Arrays]:
    """Endless batches, transformed in the step, as by default."""
    data = make_source(name, directory=str(directory), kwargs=kwargs).load()
    return TrainBatches(data.train, global_batch_size=BATCH, seed=0, on_device=True)


def rates(contenders: dict[str, Iterator[Arrays]], num_rounds: int) -> dict[str, list[float]]:
    """Examples a second of each, in each round."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds + 1):
        for name, batches in contenders.items():
            since, num_batches = time.perf_counter(), 0
            while num_batches < 4 or time.perf_counter() - since < 0.2:
                next(batches)
                num_batches += 1
            found[name].append(num_batches * BATCH / (time.perf_counter() - since))
    return {name: x[1:] for name, x in found.items()}  # the first round fills caches


GROUPS: dict[str, Callable[[Path], Made]] = {
    "images": write_images,
    "rows": write_rows,
    "tokens": write_tokens,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        datasets.config.HF_DATASETS_CACHE = Path(scratch) / "cache"
        datasets.disable_progress_bars()
        for group in arguments.only:
            root = Path(scratch) / group
            made = GROUPS[group](root)
            contenders = {name: batches_of(name, root / name, x) for name, x in made.items()}
            found = rates(contenders, arguments.rounds)
            for name, x in found.items():
                ratio = statistics.median(a / b for a, b in zip(x, found["npz"], strict=True))
                print(f"{group:7} {name:13} {statistics.median(x):12,.0f} /s {ratio:8.3f} of npz")
                results.setdefault(group, {})[name] = [statistics.median(x), ratio]
    print(json.dumps({**machine(), "load": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()
