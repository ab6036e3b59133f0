"""Batches of one and of several processes, for training from any position and for evaluation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import equal

from jddp.data import ArrayExamples, TrainBatches, eval_batches
from jddp.data.order import Order
from jddp.data.periods import Epochs, OptimizerSteps, Reached
from jddp.data.sources.arrays import image_examples
from jddp.data.transforms import FlipAndShift
from jddp.ground.errors import ConfigError, DataError


def numbered(num_examples):
    """Examples that are their own indices."""
    return ArrayExamples({"x": np.arange(num_examples)})


def train_batches(examples=10, size=4, **options):
    """Of so many numbered examples, or of the given ones."""
    examples = numbered(examples) if isinstance(examples, int) else examples
    ordered = {name: options.pop(name) for name in ("shuffle", "weights") if name in options}
    order = Order(len(examples), options.pop("seed", 0), **ordered)
    return TrainBatches(examples, order=order, **{"global_batch_size": size} | options)


def on_processes(num_processes, make, *args, **options):
    parts = range(num_processes)
    return [make(*args, process_index=r, num_processes=num_processes, **options) for r in parts]


def joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def read(batches, num_steps):
    return np.concatenate([next(batches)["x"] for _ in range(num_steps)])


def images_of(**options):
    pixels = np.arange(10 * 5**2, dtype=np.float32).reshape(-1, 5, 5, 1)
    plan = {"size": 8, "seed": 3, "transforms": [FlipAndShift()]} | options
    return train_batches(image_examples(pixels, np.arange(10)), **plan)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"num_epochs": 2.5}, {"size": 7}], ids=str)
def test_all_processes_together_read_the_rows_of_one_augmentation_included(num_processes, options):
    options = {"multiple_of": 8, **options}
    together = on_processes(num_processes, images_of, **options)
    for whole, *parts in itertools.islice(zip(images_of(**options), *together, strict=True), 4):
        equal(joined(parts), whole)


def counted(batches):
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


@pytest.mark.parametrize(("drop_remainder", "end"), [(False, 16), (True, 14)])
def test_batches_of_another_size_go_on_at_a_position_that_is_no_multiple_of_it(drop_remainder, end):
    batches = train_batches(16, num_epochs=1, drop_remainder=drop_remainder)
    batches.set_state({"position": 6})  # of a run with batches of 6 or 3
    rest = np.concatenate(counted(batches))
    np.testing.assert_array_equal(rest, read(train_batches(16), 4)[6:end])


def test_a_batch_that_devices_do_not_divide_is_padded_and_a_mask_of_the_examples_stays():
    plain, wide = train_batches(20, 6), train_batches(20, 6, multiple_of=4)
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
    few = eval_batches(numbered(25), global_batch_size=10)
    assert [len(batch["x"]) for batch in few.limited(3, 0)] == [10, 10, 5]


def test_batches_that_cannot_be_cut_are_refused():
    for options, error, message in (
        ({"num_processes": 4}, ConfigError, "10 does not divide over 4 .* 8 and 12"),
        ({"num_processes": 2, "process_index": 2}, ConfigError, "process_index=2"),
        ({"seed": -1}, ConfigError, "seed -1"),
        ({"num_epochs": 0}, ConfigError, "num_epochs 0"),
        ({"examples": 4}, DataError, "holds 4 examples, but one global batch needs 10"),
        ({"num_epochs": 0.4, "drop_remainder": True}, DataError, "do not fill a batch of 10"),
        ({"weights": np.ones(3)}, DataError, r"shape \(3,\) for 20 examples"),
        ({"weights": np.zeros(20)}, DataError, "weights"),
        ({"weights": np.arange(20) - 1.0}, DataError, "weights"),
    ):
        with pytest.raises(error, match=message):
            train_batches(**{"examples": 20, "size": 10} | options)


def test_wrong_arguments_are_refused_with_the_right_ones():
    for make, options, message in (
        (TrainBatches, {"seed": 0, "shuffle": False}, r"shuffle: .*order=jddp\.data\.Order\("),
        (TrainBatches, {}, "seed"),
        (eval_batches, {"shuffle": False}, "shuffle"),  # They are in order.
        (eval_batches, {"global_batch_size": 0}, "batch_size 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make({"x": np.arange(12.0)}, **{"global_batch_size": 4} | options)


def steps_at_ends(period, num_examples, batch_sizes):
    """The steps with which periods end, with the numbers of these periods."""
    found, now = {}, Reached(0, 0, num_examples)
    for size in batch_sizes:
        before, now = now, Reached(now.step + 1, now.examples + size, num_examples)
        if ended := period.ended(before, now):
            found[now.step] = [*ended]
    return found


@pytest.mark.parametrize(
    ("period", "num_examples", "batch_sizes", "ends"),
    [
        (OptimizerSteps(3), 20, [8] * 7, {3: [1], 6: [2]}),
        (Epochs(1), 20, [8] * 8, {3: [1], 5: [2], 8: [3]}),  # the step that takes its last example
        (Epochs(0.1), 20, [8] * 2, {1: [1, 2, 3, 4], 2: [5, 6, 7, 8]}),
        (Epochs(1), 20, [8, 8, 8, 4, 4, 4, 4], {3: [1], 7: [2]}),  # whatever the batch size
        (Epochs(1), 0, [8] * 8, {}),  # Batches that know no epochs end none.
    ],
)
def test_a_period_ends_with_the_step_that_completes_it(period, num_examples, batch_sizes, ends):
    assert steps_at_ends(period, num_examples, batch_sizes) == ends


@pytest.mark.parametrize("parts", [3, 6, 7, 10, 11, 49])
def test_as_many_parts_end_in_many_epochs_as_in_exact_arithmetic(parts):
    ends = steps_at_ends(Epochs(1 / parts), 3 * 1000 * parts, [1000] * 3 * parts * 4)
    assert ends == {3 * number: [number] for number in range(1, 4 * parts + 1)}


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf")])
def test_what_is_no_number_of_epochs_is_refused(number):
    with pytest.raises(ConfigError, match="positive"):
        Epochs(number)
