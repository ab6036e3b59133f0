"""Data: the order of examples, batches of one and of several processes, sources, bad files."""

import gzip
import itertools
import math
import shutil
import tracemalloc
from hashlib import sha256

import make_fashion_mnist as script
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import equal

from jddp.data import (
    ArrayExamples,
    Mix,
    MixtureOrder,
    TrainBatches,
    eval_batches,
    make_data_set,
    make_source,
)
from jddp.data.order import Order
from jddp.data.source import spec_of
from jddp.data.sources import SOURCES, arrays
from jddp.data.sources.arrays import image_examples, parse_idx
from jddp.data.sources.tokens import TokenExamples, source_files
from jddp.data.transforms import FlipAndShift
from jddp.ground.errors import ConfigError, DataError


def numbered(num_examples):
    """Examples that are their own indices."""
    return ArrayExamples({"x": np.arange(num_examples)})


def numbered_images(num_examples, size=5):
    pixels = np.arange(num_examples * size**2, dtype=np.float32)
    return image_examples(pixels.reshape(-1, size, size, 1), np.arange(num_examples))


def train_batches(examples=10, size=4, **options):
    """Of so many numbered examples, or of the given ones."""
    examples = numbered(examples) if isinstance(examples, int) else examples
    ordered = {name: options.pop(name) for name in ("shuffle", "weights") if name in options}
    order = Order(len(examples), options.pop("seed", 0), **ordered)
    return TrainBatches(examples, order=order, **{"global_batch_size": size} | options)


def on_processes(num_processes, make, *args, **options):
    """What each of the processes has of the batches."""
    parts = range(num_processes)
    return [make(*args, process_index=r, num_processes=num_processes, **options) for r in parts]


def read(batches, num_steps):
    return np.concatenate([next(batches)["x"] for _ in range(num_steps)])


def places(num_examples, *, seed=0, epoch=0, **options):
    """What one epoch reads."""
    positions = np.arange(num_examples) + epoch * num_examples
    return Order(num_examples, seed, **options).examples_at(positions)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_shuffled_epoch_is_a_permutation_of_any_number_of_examples(num_examples, seed, epoch):
    got = np.sort(places(num_examples, seed=seed, epoch=epoch))
    np.testing.assert_array_equal(got, np.arange(num_examples))


def test_all_permutations_are_equally_frequent():
    found = np.array([places(5, seed=seed) for seed in range(4000)])
    _, counts = np.unique(found, axis=0, return_counts=True)
    num_permutations = math.factorial(5)
    expected, freedom = len(found) / num_permutations, num_permutations - 1
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert len(counts) == num_permutations
    # Five standard deviations, of seeds that are fixed; with eight rounds it is six.
    assert abs(chi_squared - freedom) < 5 * math.sqrt(2 * freedom)


def test_a_billion_examples_need_no_table():
    tracemalloc.start()
    taken = Order(10**9, seed=0).examples_at(np.arange(128) + 10**12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(taken)) == 128
    assert taken.max() > 9 * 10**8
    assert peak < 2**20


def test_epochs_and_seeds_differ_and_unshuffled_data_and_equal_weights_keep_the_order():
    assert (places(50) != places(50, epoch=1)).any()
    assert (places(50) != places(50, seed=1)).any()
    np.testing.assert_array_equal(places(100, weights=np.full(100, 0.3)), places(100))
    assert read(train_batches(4, 3, shuffle=False), 3).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@settings(max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(0, 2**63), st.booleans())
def test_weights_are_kept_in_every_epoch_to_the_next_whole_number(weights, seed, shuffle):
    weights = np.array(weights)
    if weights.sum() < 1e-3:
        weights[0] = 1.0
    wanted = weights / weights.sum() * len(weights)
    for epoch in range(2):
        taken = places(len(weights), seed=seed, epoch=epoch, weights=weights, shuffle=shuffle)
        counts = np.bincount(taken, minlength=len(weights))
        assert (np.abs(counts - wanted) < 1 + 1e-9).all()
        assert (counts[weights == 0] == 0).all()


def images_of(**options):
    plan = {"size": 8, "seed": 3, "transforms": [FlipAndShift()]} | options
    return train_batches(numbered_images(10), **plan)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"num_epochs": 2.5}, {"size": 7}], ids=str)
def test_all_processes_together_read_what_one_would_augmentation_included(num_processes, options):
    options = {"multiple_of": 8, **options}
    together = on_processes(num_processes, images_of, **options)
    for whole, *parts in itertools.islice(zip(images_of(**options), *together, strict=True), 4):
        equal({name: np.concatenate([p[name] for p in parts]) for name in whole}, whole)


def counted(batches):
    """The examples that count, batch by batch."""
    return [batch["x"][batch.get("mask", np.ones(len(batch["x"]))) > 0] for batch in batches]


def test_only_the_last_batch_of_a_run_is_padded_with_real_rows_that_do_not_count_if_it_is_partial():
    batches = train_batches(num_epochs=1.5)
    assert batches.is_padded
    made = list(batches)
    assert [batch["mask"].tolist() for batch in made] == [[1] * 4] * 3 + [[1, 1, 1, 0]]
    assert made[-1]["x"][3] == made[-1]["x"][2]
    np.testing.assert_array_equal(np.concatenate(counted(made)), read(train_batches(), 4)[:15])
    dropped = {"num_epochs": 1, "drop_remainder": True}
    for options, sizes in (({"size": 5, "num_epochs": 2}, [5] * 4), (dropped, [4, 4])):
        batches = train_batches(**options)
        assert not batches.is_padded
        assert [[(k, len(x)) for k, x in b.items()] for b in batches] == [[("x", n)] for n in sizes]


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_of_another_size_go_on_at_a_position_that_is_no_multiple_of_it(drop_remainder):
    batches = train_batches(16, num_epochs=1, drop_remainder=drop_remainder)
    batches.set_state({"position": 6})  # of a run with batches of 6 or 3
    rest = np.concatenate(counted(batches))
    np.testing.assert_array_equal(
        rest, read(train_batches(16), 4)[6 : 14 if drop_remainder else 16]
    )


def test_a_batch_that_devices_do_not_divide_is_padded_and_a_mask_of_the_examples_stays():
    plain, wide = train_batches(20, 6), train_batches(20, 6, multiple_of=4)
    assert wide.is_padded
    for _ in range(5):
        batch = next(wide)
        assert batch["mask"].tolist() == [1] * 6 + [0] * 2
        np.testing.assert_array_equal(batch["x"][:6], next(plain)["x"])
    mask = np.eye(6, 3, dtype=np.float32)
    examples = ArrayExamples({"x": np.arange(6), "mask": mask})
    first, last = train_batches(examples, shuffle=False, num_epochs=1)
    equal((first["mask"], last["mask"]), (mask[:4], np.zeros((4, 3))))


WORLDS = st.sampled_from([(1, 1), (2, 1), (8, 1), (4, 2), (8, 4), (3, 1)])  # devices, processes


@settings(max_examples=60)
@given(st.integers(5, 60), st.data(), st.lists(WORLDS, min_size=2, max_size=4))
def test_a_run_interrupted_and_finished_elsewhere_sees_each_example_once_an_epoch(n, data, worlds):
    batch_size, num_epochs = data.draw(st.integers(1, n)), data.draw(st.integers(1, 3))
    state, seen = None, []
    for number, (num_devices, num_processes) in enumerate(worlds):
        options = {"seed": 5, "num_epochs": num_epochs, "multiple_of": num_devices}
        parts = on_processes(num_processes, train_batches, n, batch_size, **options)
        for part in parts:
            part.set_state(state or part.get_state())
        is_last = number == len(worlds) - 1
        stop = None if is_last else data.draw(st.integers(0, 6))
        for batches in itertools.islice(zip(*parts, strict=True), stop):
            seen += counted(batches)
        assert len({str(part.get_state()) for part in parts}) == 1
        state = parts[0].get_state()
    epochs = np.concatenate(seen).reshape(num_epochs, n)
    np.testing.assert_array_equal(np.sort(epochs), [np.arange(n)] * num_epochs)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 5))
def test_evaluation_covers_each_example_once_with_a_ragged_end(num_examples, size, num_processes):
    examples = numbered(num_examples)
    parts = on_processes(num_processes, eval_batches, examples, global_batch_size=size)
    for _ in range(2):  # they can be read again
        rounds = list(zip(*parts, strict=True))
        assert all(len(part) == len(rounds) for part in parts)
        seen = [batch["x"] for batches in rounds for batch in batches]
        np.testing.assert_array_equal(np.concatenate(seen), np.arange(num_examples))


OF_FOUR, A_PART = {"num_processes": 4}, {"num_epochs": 0.4, "drop_remainder": True}
UNCUT = (
    (OF_FOUR, ConfigError, r"10 does not divide over 4 .* 8 and 12"),
    (OF_FOUR | {"size": 3}, ConfigError, r"3 does not divide over 4 .* Smallest that does: 4"),
    ({"seed": -1}, ConfigError, "seed -1 is negative"),
    ({"examples": 4}, DataError, "holds 4 examples, but one global batch needs 10"),
    (A_PART, DataError, "0.4 epochs of 20 examples do not fill a batch of 10"),
    ({"weights": np.ones(3)}, DataError, r"weights have shape \(3,\) for 20 examples"),
)


def test_batches_that_cannot_be_cut_are_refused():
    for options, error, message in UNCUT:
        with pytest.raises(error, match=message):
            train_batches(**{"examples": 20, "size": 10} | options)
    for bad in (np.zeros(20), np.full(20, np.nan), np.arange(20) - 1.0):
        with pytest.raises(DataError, match="finite and not negative, and at least one positive"):
            train_batches(20, 10, weights=bad)
    with pytest.raises(ConfigError, match="batch_size 0"):
        eval_batches(numbered(4), global_batch_size=0)


def test_flips_and_shifts_move_whole_images_and_repeat_the_edge():
    image = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    batch = {"image": np.repeat(image, 4, axis=0), "label": np.arange(4)}
    # Thirds of the range move by -1, 0 and 1 pixels, down and right; its lower half mirrors.
    uniform = np.array([[0.5, 0.5, 0.1], [0.9, 0.5, 0.9], [0.5, 0.1, 0.9], [0.5, 0.9, 0.1]])
    moved = FlipAndShift(1)(batch, uniform)
    mirrored, down = [[2, 1, 0], [5, 4, 3], [8, 7, 6]], [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    right, both = [[1, 2, 2], [4, 5, 5], [7, 8, 8]], [[2, 2, 1], [5, 5, 4], [8, 8, 7]]
    assert moved["image"][..., 0].tolist() == [mirrored, down, right, both]
    equal((moved["label"], batch["image"]), (batch["label"], np.repeat(image, 4, axis=0)))


def test_what_augmentation_draws_depends_on_seed_epoch_and_example_alone():
    order = Order(1000, seed=0)
    positions = np.arange(2000)
    unshuffled = Order(1000, seed=0, shuffle=False).uniform(positions, 3)
    assert len(np.unique(unshuffled, axis=0)) == 2000
    for batch in np.split(positions, 40):
        examples = order.examples_at(batch) + 1000 * (batch // 1000)
        np.testing.assert_array_equal(order.uniform(batch, 3), unshuffled[examples])
    other = Order(1000, seed=1, shuffle=False).uniform(np.arange(2000), 3)
    assert (other != unshuffled).all()
    # Means and correlations of 2000 uniform numbers, to five standard deviations.
    np.testing.assert_allclose(unshuffled.mean(0), 0.5, atol=0.033)
    np.testing.assert_allclose(np.corrcoef(unshuffled.T) - np.eye(3), 0, atol=0.11)


def test_mixup_lays_another_image_over_each_and_keeps_both_labels():
    labels = np.arange(10)
    images = np.broadcast_to(labels[:, None, None, None].astype(np.float32), (10, 3, 3, 1))
    given = {"examples": image_examples(images, labels), "size": 10, "mix": Mix(0.4)}
    batch = next(train_batches(**given))
    share = batch["share"]
    mixed = share * batch["label"] + (1 - share) * batch["other_label"]
    np.testing.assert_allclose(batch["image"][:, 1, 1, 0], mixed, rtol=1e-5)
    assert 0 <= share.min() < share.max() <= 1
    parts = [next(part) for part in on_processes(2, train_batches, **given)]
    equal({name: np.concatenate([p[name] for p in parts]) for name in batch}, batch)
    many = [next(train_batches(seed=seed, **given))["share"] for seed in range(200)]
    # Beta(a, a): mean 1/2, variance 1/(8a + 4); five standard deviations of 2000 draws.
    assert abs(np.mean(many) - 0.5) < 5 * math.sqrt(1 / 7.2 / 2000)
    assert np.var(many) == pytest.approx(1 / 7.2, rel=0.1)
    flat = {"image": images[:, :, 0, 0], "label": labels}  # with masks, as of images in folders
    mask = {"mask": (labels < 5).astype(np.float32)}
    batch = next(train_batches(ArrayExamples(flat | mask), size=10, mix=Mix(0.4)))
    mixed = batch["share"] * batch["label"] + (1 - batch["share"]) * batch["other_label"]
    np.testing.assert_allclose(batch["image"][:, 1], mixed, rtol=1e-5)
    assert set(batch["label"][batch["mask"] > 0]) <= {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(batch["mask"], batch["label"] < 5)
    is_alone = batch["other_label"] >= 5  # an example of mask 0 is not mixed into another
    assert is_alone.any()
    np.testing.assert_array_equal(batch["share"][is_alone], 1)
    np.testing.assert_array_equal(batch["image"][is_alone, 1], batch["label"][is_alone])
    assert (batch["share"][~is_alone] < 1).any()
    with pytest.raises(ConfigError, match="mix images with labels, but the data has x"):
        next(train_batches(10, mix=Mix(0.4)))


ORDERS = {
    "sample weights": Order(40, 0, weights=np.r_[np.zeros(20), np.full(10, 0.3), np.full(10, 4.0)]),
    "a mixture": MixtureOrder((20, 20), (0.9, 0.1), 0),
    "no shuffling": Order(40, 0, shuffle=False),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("mix", [Mix(mixup=0.4), Mix(cutmix=1.0)], ids=["mixup", "cutmix"])
def test_images_are_mixed_with_those_of_their_epoch_alone(order, mix):
    labels = np.arange(40)
    examples = image_examples(np.zeros((40, 4, 4, 1), np.float32), labels)
    given = {"examples": examples, "global_batch_size": 20, "order": order, "mix": mix}
    batches = TrainBatches(**given)
    drawn = []
    for epoch in range(20):
        rows = [next(batches) for _ in range(2)]
        own, other = (np.concatenate([x[n] for x in rows]) for n in ("label", "other_label"))
        np.testing.assert_array_equal(own, order.examples_at(np.arange(40) + 40 * epoch))
        assert {*other} <= {*own}
        drawn.append([(own >= 20).mean(), (other >= 20).mean()])
    share, of_others = np.mean(drawn, 0)
    # Five standard deviations of 800 draws.
    assert of_others == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 800))
    later = TrainBatches(**given, process_index=1, num_processes=2)
    later.set_state({"position": 40 * 19 + 20})
    equal(next(later), {name: x[10:] for name, x in rows[1].items()})


def test_an_example_that_its_weight_repeats_is_augmented_in_another_way_each_time():
    order = Order(100, 0, weights=np.r_[50.0, np.ones(50), np.zeros(49)])
    draws = order.uniform(np.arange(300), 3)
    assert np.count_nonzero(order.examples_at(np.arange(300)) == 0) == 150
    assert len(np.unique(draws)) == draws.size


def test_the_rows_of_a_limited_evaluation_are_spread_over_all_in_the_same_way_each_time():
    def rows(seed=0, num_processes=1):
        found = on_processes(num_processes, eval_batches, numbered(1003), global_batch_size=10)
        limited = [batches.limited(7, seed) for batches in found]
        passes = [[list(batches) for batches in limited] for _ in range(2)]
        equal(*passes)
        steps = zip(*passes[0], strict=True)
        return np.concatenate([part["x"] for step in steps for part in step])

    chosen = rows()
    assert len(chosen) == 70
    edges = np.floor(np.linspace(0, 1003, 71))  # one row of each seventieth
    assert ((edges[:-1] <= chosen) & (chosen < edges[1:])).all()
    np.testing.assert_array_equal(rows(num_processes=2), chosen)
    assert (rows(seed=1) != chosen).any()
    # Rows that take turns would all be of one kind if each tenth row were chosen.
    assert len(np.unique(chosen % 10)) == 10
    few = eval_batches(numbered(25), global_batch_size=10)
    assert [len(batch["x"]) for batch in few.limited(3, 0)] == [10, 10, 5]


def all_of(examples):
    return examples.take(np.arange(len(examples)))


def test_embedded_fashion_mnist_is_balanced_and_held_out_examples_are_not_trained_on():
    def as_bytes(rows):
        return {image.tobytes() for image in rows["image"]}

    data = make_source("fashion_mnist").load()
    tuning = make_source("fashion_mnist", kwargs={"num_held_out": 2500}).load()
    train, test, fewer, held_out = map(all_of, (data.train, data.test, tuning.train, tuning.test))
    for rows, per_class in ((train, 1500), (test, 1000), (fewer, 1250), (held_out, 250)):
        assert np.bincount(rows["label"]).tolist() == [per_class] * 10
    assert abs(train["image"].mean()) < 0.01
    assert abs(train["image"].std() - 1) < 0.01
    assert "embedded: 15,000 train / 10,000 test" in data.description
    assert as_bytes(fewer) | as_bytes(held_out) == as_bytes(train)
    assert not as_bytes(fewer) & as_bytes(held_out)


def test_sources_know_their_shapes_without_reading():
    assert list(SOURCES) == sorted(SOURCES)
    for name in ("fashion_mnist", "python_stdlib"):
        source = make_source(name)
        data, again = source.load(), source.load()
        assert spec_of(data.train) == spec_of(data.test) == source.spec
        assert data.sha256 == again.sha256
        assert len(data.sha256) == 64


def test_standard_library_text_is_cut_into_windows_without_tests_and_what_was_installed(tmp_path):
    data = make_source("python_stdlib", kwargs={"sequence_length": 64}).load()
    assert data.sha256[:12] in data.description
    assert 0.05 < len(data.test) / len(data.train) < 0.2
    window = data.train.take(np.array([0, 1]))["tokens"]
    assert window.shape == (2, 65)
    assert window[0, -1] == window[1, 0]
    assert window.max() < 256
    for name in ("a.py", "b/c.py", "b/test/d.py", "site-packages/e.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.as_posix() for path in source_files(tmp_path)] == ["a.py", "b/c.py"]


def test_token_directory_yields_windows_or_is_refused(tmp_path):
    shard = np.arange(21, dtype=np.uint16)

    def read_tokens(train, **kwargs):
        np.save(tmp_path / "train.npy", train)
        kwargs = {"sequence_length": 4, "vocab_size": 21} | kwargs
        source = make_source("tokens", directory=str(tmp_path), kwargs=kwargs)
        data = source.load()
        assert spec_of(data.train) == spec_of(data.test) == source.spec
        return all_of(data.train)["tokens"], all_of(data.test)["tokens"]

    np.save(tmp_path / "test.npy", np.arange(9, dtype=np.uint32))
    train, test = read_tokens(shard)
    assert (len(train), len(test)) == (5, 2)
    assert train[4].tolist() == [16, 17, 18, 19, 20]
    for bad, kwargs, message in (
        (shard, {"sequence_length": 21}, "21 tokens are too few"),
        (shard, {"vocab_size": 20}, "token 20 at 20 is not in 0 ... 19"),
        (shard.astype(int) - 3, {}, "token -3 at 0 is not in 0 ... 20"),
        (
            shard.astype(int) + 2**31,
            {"vocab_size": None},
            "token 2147483648 at 0 is not in 0 ... 2147483647",
        ),
        (np.zeros((3, 3), np.uint16), {}, r"tokens are uint16\(3, 3\)"),
    ):
        with pytest.raises(DataError, match=rf"train\.npy: {message}"):
            read_tokens(bad, **kwargs)


@settings(max_examples=50)
@given(st.integers(0, 40), st.integers(1, 9))
def test_windows_predict_each_token_once(num_more, length):
    targets = all_of(TokenExamples(np.arange(length + 1 + num_more), sequence_length=length))
    targets = targets["tokens"][:, 1:].ravel()
    np.testing.assert_array_equal(targets, np.arange(1, len(targets) + 1))
    assert length + num_more - len(targets) < length


FULL = {"source": "full"}
WRONG_ARGUMENTS = (
    ("fashion_mnits", {}, "no data set 'fashion_mnits'. Did you mean 'fashion_mnist'"),
    ("fashion_mnist", {"kwargs": {"held_out": 5}}, "Did you mean 'num_held_out'"),
    ("fashion_mnist", {"kwargs": {"num_held_out": 5}}, "not a multiple of 10"),
    ("fashion_mnist", {"kwargs": {"source": "half"}}, "'half' of fashion_mnist is neither"),
    ("fashion_mnist", {"directory": "here"}, "not read with source 'embedded'"),
    ("python_stdlib", {"directory": "here"}, "Leave out data.dir=here"),
    ("python_stdlib", {"kwargs": {"sequence_length": 0}}, "sequence_length 0"),
    ("tokens", {"kwargs": {"sequence_length": 4}}, "Give data.dir"),
    ("tokens", {"directory": "here"}, "kwargs.sequence_length is missing"),
)


def test_what_a_loader_of_pytorch_takes_is_refused_with_what_is_meant():
    rows = {"x": np.arange(12, dtype=np.float32)}
    with pytest.raises(ConfigError, match=r"TrainBatches\.shuffle: .*order=jddp\.data\.Order\("):
        TrainBatches(rows, global_batch_size=4, seed=0, shuffle=False)
    with pytest.raises(ConfigError, match=r"TrainBatches\.drop_last: .*drop_remainder="):
        TrainBatches(rows, global_batch_size=4, seed=0, drop_last=True)
    with pytest.raises(ConfigError, match=r"eval_batches\.shuffle: .*'shuffle'\.$"):
        eval_batches(rows, global_batch_size=4, shuffle=False)  # They are in order.
    batches = TrainBatches(rows, global_batch_size=4, order=Order(12, 0, shuffle=False))
    assert next(batches)["x"].tolist() == [0, 1, 2, 3]


def test_wrong_arguments_are_refused_before_anything_is_read():
    for name, arguments, message in WRONG_ARGUMENTS:
        with pytest.raises(ConfigError, match=message):
            make_source(name, **arguments)


def test_a_file_that_is_missing_truncated_or_altered_is_named_and_nothing_takes_its_place(
    tmp_path, monkeypatch
):
    for directory, message in (
        (tmp_path / "absent", r"absent: no such directory, .* dataset-fashion-mnist"),
        (tmp_path, r"t10k-images-idx3-ubyte\.gz: no such file"),
    ):
        with pytest.raises(DataError, match=message):
            make_source("fashion_mnist", kwargs=FULL, directory=str(directory)).load()
    for path in arrays._HERE.glob("*.gz"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(arrays, "_HERE", tmp_path)
    labels, images = "t10k-labels-idx1-ubyte.gz", "train-15000-images-idx3-ubyte.gz"
    sound = {name: (tmp_path / name).read_bytes() for name in (labels, images)}
    altered = parse_idx(gzip.decompress(sound[labels])).copy()
    altered[17] += 1
    for name, damaged, message in (
        (labels, None, r"t10k-labels-idx1-ubyte\.gz: no such file"),
        (images, sound[images][:-1000], r"images-idx3-ubyte\.gz: not a whole gzip file"),
        (labels, script.pack(altered), r"labels-idx1-ubyte\.gz: altered: unpacked, its sha256 is"),
    ):
        path = tmp_path / name
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            make_source("fashion_mnist").load()
        path.write_bytes(sound[name])


BAD_DATA = (
    ({}, "no arrays"),
    ({"x": np.zeros(3), "y": np.zeros(2)}, "different lengths: x 3, y 2"),
    ({"x": np.zeros((0, 2))}, "0 examples"),
    ({"x": np.array([[0.0, 1.0], [np.nan, 0.0]])}, "NaN or infinity, first in row 1"),
    ({"x": np.array(["a"])}, "rows of numbers"),
    ({"x": np.array([2**31])}, "2147483648, which needs 64 bits"),
    ({"x": np.array([5, -(2**31) - 1])}, "-2147483649, which needs 64 bits, first in row 1"),
    ({"x": np.array([0, 1e300])}, r"1e\+300, which needs 64 bits, first in row 1"),
    ({1, 2}, "type set cannot be read"),
    ([1, 2], "a row of the data is int"),
    (np.zeros((2, 3)), "a row of the data is ndarray"),
)


def test_own_arrays_become_a_data_set_in_32_bits_or_are_refused():
    x = np.linspace(0, 1, 12).reshape(6, 2)
    data = make_data_set("mine", {"x": x, "y": np.arange(6)}, {"x": x[:2], "y": np.arange(2)})
    spec = {"x": ((2,), np.dtype("float32")), "y": ((), np.dtype("int32"))}
    assert spec_of(data.train) == spec
    assert data.description == "mine: 6 train / 2 test examples"
    assert make_data_set("mine", data.train, data.test).sha256 == data.sha256
    assert make_data_set("mine", data.test, data.train).sha256 != data.sha256
    for dtype, narrow in ((">f4", "float32"), (">i8", "int32"), ("uint64", "uint32")):
        (row,) = ArrayExamples({"x": np.array([1, 2], dtype)}).take(np.array([1])).values()
        assert (row.tolist(), row.dtype) == ([2], np.dtype(narrow))
    for data, message in BAD_DATA:
        with pytest.raises(DataError, match=message):
            make_data_set("mine", data, {"x": np.zeros(1)})


BAD_IMAGES = (
    ({"image_size": 9}, r"images of shape \(8, 8, 3\), .* ask for \(9, 9, 3\)"),
    ({"labels": np.arange(6) + 5}, "range from 0 to 10. With num_classes 10"),
    ({"labels": np.arange(6) - 1}, "range from -1 to 4"),
    ({"labels": np.zeros(6)}, "Each image needs one whole number"),
    ({"dtype": np.int64}, "need uint8 or floating point"),
    ({"num_train": 0}, r"n > 0"),
    ({"mean": [0.5, 0.5]}, "mean has 2 numbers, but images have 3 channels"),
    ({"std": [[0.5]]}, "std has 1 numbers"),
)


def test_npy_directory_is_normalised_per_channel_and_bad_images_are_refused(tmp_path):
    def make(*, num_train=6, labels=None, dtype=np.uint8, **kwargs):
        for part, n in (("train", num_train), ("test", 4)):
            np.save(tmp_path / f"{part}_images.npy", np.full((n, 8, 8, 3), 255, dtype))
            given = np.arange(n) if labels is None else labels[:n]
            np.save(tmp_path / f"{part}_labels.npy", given)
        kwargs = {"image_size": 8, "num_classes": 10} | kwargs
        return make_source("npy", directory=str(tmp_path), kwargs=kwargs)

    source = make(mean=[0.0, 0.5, 1.0], std=[1.0, 0.5, 0.25])
    data = source.load()
    assert spec_of(data.train) == source.spec
    np.testing.assert_allclose(all_of(data.train)["image"][2, 0, 0], [1, 1, 0], 1e-6)
    assert data.sha256 != make().load().sha256
    for damage, message in BAD_IMAGES:
        with pytest.raises(DataError, match=message):
            make(**damage).load()
    images = np.zeros((4, 2, 2, 1), np.float32)
    images[3, 0, 0] = np.nan
    with pytest.raises(DataError, match="NaN or infinity, first in row 3"):  # when it is read
        image_examples(images, np.zeros(4, int)).take(np.array([1, 3]))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.randoms())
def test_idx_arrays_survive_the_round_trip_and_every_cut_is_refused(shape, random):
    array = np.random.default_rng(random.getrandbits(32)).integers(0, 256, shape).astype(np.uint8)
    plain = gzip.decompress(script.pack(array))
    np.testing.assert_array_equal(parse_idx(plain), array)
    for end in range(len(plain)):
        with pytest.raises(DataError, match=r"not an IDX file|not a whole IDX file"):
            parse_idx(plain[:end])


def test_script_keeps_as_many_of_each_class_and_the_whole_test_set(tmp_path, monkeypatch):
    made = tmp_path / "made"
    made.mkdir()
    for names, per_class in ((script.TRAIN, 5), (script.TEST, 2)):  # like the original files
        labels = np.arange(10 * per_class) % 10
        pixels = np.random.default_rng(per_class).integers(0, 256, (len(labels), 28, 28))
        for name, array in zip(names, (pixels, labels), strict=True):
            (tmp_path / f"{name}.gz").write_bytes(script.pack(array))
    monkeypatch.setattr(script, "NUM_PER_CLASS", 3)
    script.main(tmp_path, made)
    sums = {"embedded": made / "SHA256SUMS", "full": made / "SHA256SUMS.original"}
    monkeypatch.setattr(arrays, "_SUMS", sums)
    monkeypatch.setattr(arrays, "_HERE", made)
    part = make_source("fashion_mnist").load()
    full = make_source("fashion_mnist", kwargs=FULL, directory=str(tmp_path)).load()
    assert part.description == "Fashion-MNIST embedded: 30 train / 20 test examples"
    assert full.description == "Fashion-MNIST full: 50 train / 20 test examples"
    assert part.sha256 != full.sha256
    assert np.bincount(all_of(part.train)["label"]).tolist() == [3] * 10
    equal(all_of(part.test)["image"], all_of(full.test)["image"])


def test_shipped_images_are_those_that_the_script_chooses():
    """Of 6,000 images a class 1,500 are kept, by hash: the first byte of all is in the low part."""
    directory = arrays._HERE
    images, labels = (parse_idx(script.unpack(directory / f"{name}.gz")) for name in script.KEPT)
    first_bytes = [sha256(image.tobytes()).digest()[0] for image in images]
    assert max(first_bytes) < 0.28 * 256
    np.testing.assert_array_equal(np.bincount(labels), [script.NUM_PER_CLASS] * 10)


def test_examples_that_are_masked_out_are_counted_and_padding_is_not():
    rows = {"x": np.arange(10.0), "mask": np.arange(10) != 3}
    batches = TrainBatches(rows, global_batch_size=6, seed=0, num_epochs=1, multiple_of=4)
    masks = np.concatenate([batch["mask"] for batch in batches])
    assert (len(masks), masks.sum()) == (16, 9)
    assert batches.num_masked == 1
