"""The rows of training batches: by source, and by the number of processes that read them."""

import hashlib
import json
from unittest import mock

import datasets
import jax
import numpy as np
from data_files import file_of, write_images, write_tar

from jddp.data import ArrayExamples, MixtureOrder, Order, TrainBatches, eval_batches, make_source

WORLDS = (1, 2, 4, 8)
NUM_EXAMPLES, BATCH, NUM_ROWS = 1_237, 40, 10_000


def hash_of(*arrays):
    """The SHA-256 of arrays with their shapes and dtypes."""
    digest = hashlib.sha256()
    for x in map(np.ascontiguousarray, arrays):
        digest.update(f"{x.shape} {x.dtype}".encode() + x.tobytes())
    return digest.hexdigest()


def weights():
    return np.random.default_rng(0).choice([0.0, 0.5, 1.0, 4.0], NUM_EXAMPLES)


ORDERS = {
    "shuffled": lambda: Order(NUM_EXAMPLES, seed=3),
    "in order": lambda: Order(NUM_EXAMPLES, seed=3, shuffle=False),
    "weighted": lambda: Order(NUM_EXAMPLES, seed=3, weights=weights()),
    "mixture": lambda: MixtureOrder((937, 200, 100), (0.2, 0.3, 0.5), seed=3),
}


def rows(order, num_processes):
    """The first rows of a run, as its processes read them, in the order of the global batch."""
    readers = [
        TrainBatches(
            ArrayExamples({"x": np.arange(NUM_EXAMPLES)}),
            global_batch_size=BATCH,
            order=ORDERS[order](),
            process_index=process,
            num_processes=num_processes,
        )
        for process in range(num_processes)
    ]
    steps = [[next(reader)["x"] for reader in readers] for _ in range(NUM_ROWS // BATCH)]
    return hash_of(np.concatenate([x for step in steps for x in step]))


def evaluated(num_processes):
    """The rows of an evaluation, with those that pad the last batch at 0."""
    examples = ArrayExamples({"x": np.arange(NUM_EXAMPLES)})
    share = {"global_batch_size": BATCH, "num_processes": num_processes}
    readers = [eval_batches(examples, process_index=x, **share) for x in range(num_processes)]
    steps = zip(*readers, strict=True)
    return hash_of(*(np.concatenate([batch["x"] for batch in step]) for step in steps))


def _image_folder(folder):
    rng, parts = np.random.default_rng(4), {"train": 12, "test": 5}
    names = (
        f"{part}/{name}/{i}.png" for part in parts for name in "ab" for i in range(parts[part])
    )
    write_images(folder, {x: file_of(rng.integers(0, 256, (9, 11, 3), np.uint8)) for x in names})
    return {"image_size": 8}


def _webdataset(folder):
    rng = np.random.default_rng(5)
    for part, num in (("train", 12), ("test", 5)):
        members = {}
        for i in range(num):
            members[f"{i:04}.png"] = file_of(rng.integers(0, 256, (9, 11, 3), np.uint8))
            members[f"{i:04}.cls"] = str(i % 3).encode()
        write_tar(folder / f"{part}-000.tar", members)
    return {"image_size": 8}


def _arrays(folder):
    rng = np.random.default_rng(6)
    return {
        part: {"image": rng.normal(size=(num, 4)).astype(np.float32), "label": np.arange(num) % 3}
        for part, num in (("train", 30), ("test", 11))
    }


def _npz(folder):
    for part, arrays in _arrays(folder).items():
        np.savez(folder / f"{part}.npz", **arrays)
    return {}


def _npy(folder):
    rng = np.random.default_rng(9)
    for part, num in (("train", 30), ("test", 11)):
        np.save(folder / f"{part}_images.npy", rng.integers(0, 256, (num, 6, 6, 3), np.uint8))
        np.save(folder / f"{part}_labels.npy", np.arange(num) % 3)
    return {"image_size": 6, "num_classes": 3}


def _tokens(folder):
    rng = np.random.default_rng(8)
    for part, num in (("train", 900), ("test", 300)):
        np.save(folder / f"{part}.npy", rng.integers(0, 200, num, np.uint16))
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 200}))
    return {"sequence_length": 16}


SOURCES = {
    "fashion_mnist": None,
    "image_folder": _image_folder,
    "webdataset": _webdataset,
    "npz": _npz,
    "npy": _npy,
    "tokens": _tokens,
}


def source(name, folder):
    """The rows of a source, of training and test, each in the order of its files."""
    make = SOURCES[name]
    kwargs = {} if make is None else make(folder)
    place = {} if make is None else {"directory": str(folder)}
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", folder / "cache"):
        data = make_source(name, kwargs=kwargs, **place).load()
    found = {}
    for part, examples in (("train", data.train), ("test", data.test)):
        if examples is not None:
            batch = examples.take(np.arange(min(len(examples), 200)))
            found[part] = hash_of(*jax.tree.leaves(dict(sorted(batch.items()))))
    return found
