"""Data: the order of examples, batches of one and of several processes, sources, bad files."""

import gzip
import importlib.util
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jddp.data import (
    SOURCES,
    ArrayExamples,
    FlipAndShift,
    ImageExamples,
    TokenExamples,
    TrainBatches,
    eval_batches,
    make_data_set,
    make_source,
    spec_of,
)
from jddp.data import fashion_mnist as embedded
from jddp.data.idx import pack_idx, parse_idx, read_idx
from jddp.data.stdlib_text import source_files
from jddp.errors import ConfigError, DataError


def numbered(num_examples):
    """Examples that are their own indices."""
    return ArrayExamples({"x": np.arange(num_examples)})


def numbered_images(num_examples, size=5):
    pixels = np.arange(num_examples * size * size, dtype=np.float32)
    return ImageExamples(
        pixels.reshape(num_examples, size, size, 1), np.arange(num_examples), mean=0.0, std=1.0
    )


def read(batches, num_steps):
    return np.concatenate([next(batches)["x"] for _ in range(num_steps)])


@pytest.fixture(scope="module")
def fashion():
    return make_source("fashion_mnist").load()


# The order.


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 2**63))
def test_every_epoch_reads_every_example_once_whatever_the_batch(num_examples, batch_size, seed):
    batches = TrainBatches(numbered(num_examples), global_batch_size=batch_size, seed=seed)
    num_epochs = 3
    run = read(batches, -(-num_epochs * num_examples // batch_size))
    epochs = run[: num_epochs * num_examples].reshape(num_epochs, num_examples)
    np.testing.assert_array_equal(np.sort(epochs), [np.arange(num_examples)] * num_epochs)


def test_order_is_fixed_by_seed_and_position_and_not_by_the_batch_size():
    by_three = read(TrainBatches(numbered(10), global_batch_size=3, seed=7), 10)
    by_five = read(TrainBatches(numbered(10), global_batch_size=5, seed=7), 6)
    np.testing.assert_array_equal(by_three, by_five)


def test_order_is_the_same_on_every_machine_and_version():
    run = read(TrainBatches(numbered(10), global_batch_size=10, seed=0), 2)
    assert run.tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7, 5, 3, 7, 8, 2, 4, 1, 0, 6, 9]


def test_epochs_and_seeds_differ_and_unshuffled_data_keep_their_order():
    first, second = read(TrainBatches(numbered(50), global_batch_size=50, seed=0), 2).reshape(2, 50)
    other_seed = read(TrainBatches(numbered(50), global_batch_size=50, seed=1), 1)
    assert (first != second).any()
    assert (first != other_seed).any()
    plain = TrainBatches(numbered(4), global_batch_size=3, seed=0, shuffle=False)
    assert read(plain, 3).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


# Batches.


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_all_processes_together_read_what_one_would_augmentation_included(num_processes):
    def batches(process_index, num_processes):
        return TrainBatches(
            numbered_images(10),
            global_batch_size=8,
            seed=3,
            augment=FlipAndShift(),
            process_index=process_index,
            num_processes=num_processes,
        )

    alone = batches(0, 1)
    together = [batches(r, num_processes) for r in range(num_processes)]
    for _ in range(3):
        parts = [next(part) for part in together]
        for name, whole in next(alone).items():
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), whole)


def test_state_resumes_where_it_was_taken():
    batches = TrainBatches(numbered_images(10), global_batch_size=4, seed=0, augment=FlipAndShift())
    next(batches), next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(4)]
    resumed = TrainBatches(numbered_images(10), global_batch_size=4, seed=0, augment=FlipAndShift())
    resumed.set_state(state)
    assert state == {"position": 2}
    for batch in expected:
        again = next(resumed)
        np.testing.assert_array_equal(again["image"], batch["image"])
        np.testing.assert_array_equal(again["label"], batch["label"])


def test_reading_ahead_by_step_disturbs_nothing():
    batches = TrainBatches(numbered(10), global_batch_size=4, seed=0)
    ahead = batches.batch(2)["x"]
    np.testing.assert_array_equal(read(batches, 3)[8:], ahead)
    assert batches.steps_per_epoch == 2.5


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 5))
def test_evaluation_covers_each_example_once_with_a_ragged_end(num_examples, size, num_processes):
    parts = [
        eval_batches(
            numbered(num_examples),
            global_batch_size=size,
            process_index=r,
            num_processes=num_processes,
        )
        for r in range(num_processes)
    ]
    rounds = list(zip(*parts, strict=True))
    assert all(len(part) == len(rounds) for part in parts)
    seen = [batch["x"] for batches in rounds for batch in batches]
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(num_examples))


def test_evaluation_batches_can_be_read_again():
    batches = eval_batches(numbered(5), global_batch_size=2)
    for _ in range(2):
        assert [batch["x"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(ConfigError, match=r"10 does not divide over 4 .* 8 and 12"):
        TrainBatches(numbered(4), global_batch_size=10, seed=0, num_processes=4)
    with pytest.raises(ConfigError, match=r"3 does not divide over 4 .* Smallest that does: 4"):
        TrainBatches(numbered(4), global_batch_size=3, seed=0, num_processes=4)
    with pytest.raises(ConfigError, match="seed -1 is negative"):
        TrainBatches(numbered(4), global_batch_size=2, seed=-1)
    with pytest.raises(ConfigError, match="batch_size 0"):
        eval_batches(numbered(4), global_batch_size=0)


# Augmentation.


def test_flips_and_shifts_move_whole_images_and_repeat_the_edge():
    image = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    batch = {"image": np.repeat(image, 4, axis=0), "label": np.arange(4)}
    choices = {
        "down": np.array([0, 1, 0, 0]),
        "right": np.array([0, 0, -1, 1]),
        "mirrored": np.array([True, False, False, True]),
    }
    moved = FlipAndShift(1).apply(batch, choices)
    assert moved["image"][..., 0].tolist() == [
        [[2, 1, 0], [5, 4, 3], [8, 7, 6]],
        [[0, 1, 2], [0, 1, 2], [3, 4, 5]],
        [[1, 2, 2], [4, 5, 5], [7, 8, 8]],
        [[2, 2, 1], [5, 5, 4], [8, 8, 7]],
    ]
    np.testing.assert_array_equal(moved["label"], batch["label"])
    np.testing.assert_array_equal(batch["image"], np.repeat(image, 4, axis=0))


def test_augmentation_mirrors_half_and_uses_every_shift():
    choices = FlipAndShift(2).draw(np.random.default_rng(0), 10_000)
    assert abs(choices["mirrored"].mean() - 0.5) < 0.02
    for move in ("down", "right"):
        assert np.unique(choices[move]).tolist() == [-2, -1, 0, 1, 2]


# Sources.


def test_embedded_fashion_mnist_is_balanced_and_normalised(fashion):
    assert (len(fashion.train), len(fashion.test)) == (15_000, 10_000)
    train = fashion.train.take(np.arange(15_000))
    assert np.bincount(train["label"]).tolist() == [1500] * 10
    assert np.bincount(fashion.test.take(np.arange(10_000))["label"]).tolist() == [1000] * 10
    assert abs(train["image"].mean()) < 0.01
    assert abs(train["image"].std() - 1) < 0.01
    assert "embedded: 15,000 train / 10,000 test" in fashion.description


def test_held_out_examples_replace_the_test_set_and_are_not_trained_on(fashion):
    tuning = make_source("fashion_mnist", kwargs={"num_held_out": 2500}).load()
    assert (len(tuning.train), len(tuning.test)) == (12_500, 2_500)
    held_out = tuning.test.take(np.arange(2_500))
    assert np.bincount(held_out["label"]).tolist() == [250] * 10

    def as_bytes(examples):
        return {image.tobytes() for image in examples.take(np.arange(len(examples)))["image"]}

    assert as_bytes(tuning.train) | as_bytes(tuning.test) == as_bytes(fashion.train)
    assert not as_bytes(tuning.train) & as_bytes(tuning.test)


@pytest.mark.parametrize("name", ["fashion_mnist", "python_stdlib"])
def test_sources_know_their_shapes_without_reading(name):
    source = make_source(name)
    data = source.load()
    assert spec_of(data.train) == spec_of(data.test) == source.spec
    assert len(data.sha256) == 64


def test_standard_library_text_is_the_same_twice_and_its_parts_are_disjoint():
    source = make_source("python_stdlib", kwargs={"sequence_length": 64})
    data = source.load()
    assert data.sha256 == source.load().sha256
    assert data.sha256[:12] in data.description
    assert 0.05 < len(data.test) / len(data.train) < 0.2
    window = data.train.take(np.array([0, 1]))["tokens"]
    assert window.shape == (2, 65)
    assert window[0, -1] == window[1, 0]
    assert window.max() < 256


def test_standard_library_leaves_out_tests_and_what_was_installed(tmp_path):
    for name in ("a.py", "b/c.py", "b/test/d.py", "site-packages/e.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.as_posix() for path in source_files(tmp_path)] == ["a.py", "b/c.py"]


def save_images(directory, *, num_train=6, labels=None, dtype=np.uint8):
    for part, n in (("train", num_train), ("test", 4)):
        np.save(directory / f"{part}_images.npy", np.full((n, 8, 8, 3), 255, dtype))
        np.save(directory / f"{part}_labels.npy", np.arange(n) if labels is None else labels[:n])


def make_npy(directory, **kwargs):
    kwargs = {"image_size": 8, "num_classes": 10} | kwargs
    return make_source("npy", directory=str(directory), kwargs=kwargs)


def test_npy_directory_is_memory_mapped_and_normalised_per_channel(tmp_path):
    save_images(tmp_path)
    source = make_npy(tmp_path, mean=[0.0, 0.5, 1.0], std=[1.0, 0.5, 0.25])
    data = source.load()
    assert spec_of(data.train) == source.spec
    np.testing.assert_allclose(data.train.take(np.array([2]))["image"][0, 0, 0], [1, 1, 0], 1e-6)
    assert data.sha256 != make_npy(tmp_path).load().sha256


def test_token_directory_yields_windows(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(21, dtype=np.uint16))
    np.save(tmp_path / "test.npy", np.arange(9, dtype=np.uint32))
    kwargs = {"sequence_length": 4, "vocab_size": 21}
    source = make_source("tokens", directory=str(tmp_path), kwargs=kwargs)
    data = source.load()
    assert (len(data.train), len(data.test)) == (5, 2)
    assert spec_of(data.train) == spec_of(data.test) == source.spec
    assert data.train.take(np.array([4]))["tokens"].tolist() == [[16, 17, 18, 19, 20]]


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 50), st.integers(1, 9))
def test_windows_predict_each_token_once(num_tokens, sequence_length):
    if num_tokens <= sequence_length:
        return
    windows = TokenExamples(np.arange(num_tokens), sequence_length=sequence_length)
    targets = windows.take(np.arange(len(windows)))["tokens"][:, 1:].ravel()
    np.testing.assert_array_equal(targets, np.arange(1, len(targets) + 1))
    assert num_tokens - 1 - len(targets) < sequence_length


def test_own_arrays_become_a_data_set_in_32_bits():
    x = np.linspace(0, 1, 12).reshape(6, 2)
    data = make_data_set("mine", {"x": x, "y": np.arange(6)}, {"x": x[:2], "y": np.arange(2)})
    assert spec_of(data.train) == {
        "x": ((2,), np.dtype("float32")),
        "y": ((), np.dtype("int32")),
    }
    assert data.description == "mine: 6 train / 2 test examples"
    assert make_data_set("mine", data.train, data.test).sha256 == data.sha256
    assert make_data_set("mine", data.test, data.train).sha256 != data.sha256


def test_data_imports_without_jax():
    code = "import sys, jddp.data; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Wrong names and arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "fashion_mnits"}, "no data set 'fashion_mnits'. Did you mean 'fashion_mnist'"),
        ({"name": "fashion_mnist", "kwargs": {"held_out": 5}}, "Did you mean 'num_held_out'"),
        ({"name": "fashion_mnist", "kwargs": {"source": "full"}}, "belongs into data.source"),
        ({"name": "fashion_mnist", "kwargs": {"num_held_out": 5}}, "not a multiple of 10"),
        ({"name": "fashion_mnist", "source": "half"}, "'half' of fashion_mnist is neither"),
        ({"name": "fashion_mnist", "directory": "here"}, "not read with source 'embedded'"),
        ({"name": "python_stdlib", "source": "full"}, "leave out data.source"),
        ({"name": "python_stdlib", "kwargs": {"sequence_length": 0}}, "sequence_length 0"),
        ({"name": "tokens", "kwargs": {"sequence_length": 4}}, "Give data.dir"),
        ({"name": "tokens", "directory": "here"}, "kwargs.sequence_length is missing"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_source(**arguments)


def test_source_names_are_sorted():
    assert list(SOURCES) == sorted(SOURCES)


# Bad data.


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The embedded files in a directory where they may be damaged."""
    for path in embedded._HERE.glob("*.gz"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(embedded, "_HERE", tmp_path)
    return tmp_path


def test_a_missing_file_is_named(copied):
    (copied / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz: No such file"):
        make_source("fashion_mnist").load()


def test_a_truncated_file_is_refused(copied):
    path = copied / "train-15000-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"truncated or altered: .* not a whole gzip file"):
        make_source("fashion_mnist").load()


def test_an_altered_file_is_refused(copied):
    path = copied / "t10k-labels-idx1-ubyte.gz"
    labels = parse_idx(gzip.decompress(path.read_bytes())).copy()
    labels[17] += 1
    path.write_bytes(pack_idx(labels))
    with pytest.raises(DataError, match="altered: unpacked, its sha256 is"):
        make_source("fashion_mnist").load()


def test_full_source_without_its_files_fails_and_falls_back_on_nothing(tmp_path):
    absent = make_source("fashion_mnist", source="full", directory=str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"absent: no such directory, .* dataset-fashion-mnist"):
        absent.load()
    empty = make_source("fashion_mnist", source="full", directory=str(tmp_path))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz: No such file"):
        empty.load()


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.randoms())
def test_idx_arrays_survive_the_round_trip_and_every_cut_is_refused(shape, random):
    array = np.random.default_rng(random.getrandbits(32)).integers(0, 256, shape).astype(np.uint8)
    plain = gzip.decompress(pack_idx(array))
    np.testing.assert_array_equal(parse_idx(plain), array)
    for end in range(len(plain)):
        with pytest.raises(DataError, match=r"not an IDX file|not a whole IDX file"):
            parse_idx(plain[:end])


def test_idx_file_is_read_only_with_the_right_sum(tmp_path):
    (tmp_path / "x.gz").write_bytes(pack_idx(np.zeros(3)))
    with pytest.raises(DataError, match=r"x\.gz: altered"):
        read_idx(tmp_path / "x.gz", sha256_hex="0" * 64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no arrays"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, "different lengths: x 3, y 2"),
        ({"x": np.zeros((0, 2))}, "0 examples"),
        ({"x": np.array([[0.0, 1.0], [np.nan, 0.0]])}, "NaN or infinity, first in row 1"),
        ({"x": np.array(["a"])}, "rows of numbers"),
        ({"x": np.array([2**31])}, "2147483648, which needs 64 bits"),
    ],
)
def test_bad_arrays_are_refused(arrays, message):
    with pytest.raises(DataError, match=message):
        ArrayExamples(arrays)


def test_data_that_are_not_data_are_refused():
    with pytest.raises(DataError, match="type list cannot be read"):
        make_data_set("mine", [1, 2], {"x": np.zeros(1)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kwargs": {"image_size": 9}}, r"images of shape \(8, 8, 3\), .* say \(9, 9, 3\)"),
        ({"labels": np.arange(6) + 5}, "reach from 0 to 10. With num_classes 10"),
        ({"labels": np.arange(6) - 1}, "reach from -1 to 4"),
        ({"labels": np.zeros(6)}, "whole number each"),
        ({"dtype": np.int64}, "need uint8 or floating point"),
        ({"num_train": 0}, r"n > 0"),
    ],
)
def test_bad_image_directories_are_refused(tmp_path, damage, message):
    kwargs = damage.pop("kwargs", {})
    save_images(tmp_path, **damage)
    with pytest.raises(DataError, match=message):
        make_npy(tmp_path, **kwargs).load()


def test_images_with_nan_are_refused_when_read():
    images = np.zeros((4, 2, 2, 1), np.float32)
    images[3, 0, 0] = np.nan
    examples = ImageExamples(images, np.zeros(4, int))
    with pytest.raises(DataError, match="NaN or infinity, first in row 3"):
        examples.take(np.array([1, 3]))


def test_bad_token_directories_are_refused(tmp_path):
    def load(**kwargs):
        kwargs = {"sequence_length": 4} | kwargs
        data = make_source("tokens", directory=str(tmp_path), kwargs=kwargs).load()
        return data.train.take(np.arange(len(data.train)))

    with pytest.raises(DataError, match=r"train\.npy: no such file"):
        load()
    (tmp_path / "train.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=r"train\.npy: not a whole \.npy file"):
        load()
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}.npy", np.arange(9, dtype=np.uint16))
    with pytest.raises(DataError, match=r"train\.npy: 9 tokens are too few"):
        load(sequence_length=9)
    with pytest.raises(DataError, match="token 8 does not lie below vocab_size 8"):
        load(vocab_size=8)
    np.save(tmp_path / "train.npy", np.zeros((3, 3), np.uint16))
    with pytest.raises(DataError, match=r"train\.npy: tokens are uint16\(3, 3\)"):
        load()


# Where the shipped files come from.


@pytest.fixture
def script():
    """The module that made the shipped files."""
    path = Path(__file__).parents[1] / "scripts" / "make_fashion_mnist.py"
    spec = importlib.util.spec_from_file_location("make_fashion_mnist", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def originals(tmp_path, script):
    """Four files like the original ones: five images a class to train, two to test."""
    for names, per_class in ((script.TRAIN, 5), (script.TEST, 2)):
        labels = np.arange(10 * per_class) % 10
        pixels = np.random.default_rng(per_class).integers(0, 256, (len(labels), 28, 28))
        for name, array in zip(names, (pixels, labels), strict=True):
            (tmp_path / f"{name}.gz").write_bytes(pack_idx(array))
    return tmp_path


def test_script_keeps_as_many_of_each_class_and_the_whole_test_set(
    script, originals, tmp_path, monkeypatch
):
    monkeypatch.setattr(script, "NUM_PER_CLASS", 3)
    made = tmp_path / "made"
    made.mkdir()
    script.main(originals, made)
    sums = {"embedded": made / "SHA256SUMS", "full": made / "SHA256SUMS.original"}
    monkeypatch.setattr(embedded, "_SUMS", sums)
    monkeypatch.setattr(embedded, "_HERE", made)
    part = make_source("fashion_mnist").load()
    full = make_source("fashion_mnist", source="full", directory=str(originals)).load()
    assert part.description == "Fashion-MNIST embedded: 30 train / 20 test examples"
    assert full.description == "Fashion-MNIST full: 50 train / 20 test examples"
    assert part.sha256 != full.sha256
    assert np.bincount(part.train.take(np.arange(30))["label"]).tolist() == [3] * 10
    np.testing.assert_array_equal(
        part.test.take(np.arange(20))["image"], full.test.take(np.arange(20))["image"]
    )


def test_shipped_images_are_those_that_the_script_chooses(script):
    """Of 6,000 images a class 1,500 are kept, by hash: the first byte of all is in the low part."""
    directory = Path(embedded.__file__).parent
    images, labels = (parse_idx(script.unpack(directory / f"{name}.gz")) for name in script.KEPT)
    first_bytes = [sha256(image.tobytes()).digest()[0] for image in images]
    assert max(first_bytes) < 0.28 * 256
    np.testing.assert_array_equal(np.bincount(labels), [script.NUM_PER_CLASS] * 10)
