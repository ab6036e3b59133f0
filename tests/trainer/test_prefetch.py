"""Batches on their way to the loop: read ahead, counted where they are taken, resumed exactly."""

import copy
import itertools
import json
import random
import threading
from collections import OrderedDict
from unittest import mock

import datasets
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import refused

from jddp.data import Order, TrainBatches, eval_batches
from jddp.data.batches import Share
from jddp.distributed import coordination
from jddp.ground.errors import ConfigError, DataError
from jddp.trainer.prefetch import DEPTH, Source, digest_of_rows
from jddp.trainer.reports.files import from_plain, to_plain


def put(batch):
    return ("on devices", batch)


def started(batches, num_batches, position=None):
    source = Source(batches, put)
    if position is not None:
        source.move_to(position)
    source.start(num_batches)
    return source


def take(source, num_batches):
    batches = [next(source)[1] for _ in range(num_batches)]
    return [batch["i"] if isinstance(batch, dict) else int(batch) for batch in batches]


class Counting:
    """An iterator that knows its position: one nested dict, which it changes and hands out so."""

    def __init__(self, form=copy.deepcopy):
        self.given, self.form = {"epoch": {"next": 0}}, form

    def __iter__(self):
        return self

    def __next__(self):
        self.given["epoch"]["next"] += 1
        return self.given["epoch"]["next"] - 1

    def get_state(self):
        return self.form(self.given)

    def set_state(self, state):
        self.given = json.loads(state) if isinstance(state, bytes) else state


class Loader(Counting):
    """An iterable whose iterators have the names of torchdata's loaders."""

    state_dict, load_state_dict = Counting.get_state, Counting.set_state
    get_state = set_state = None

    def __iter__(self):
        while True:
            yield self.__next__()


MAKERS = {
    "states": Counting,
    "bytes": lambda: Counting(lambda state: json.dumps(state).encode()),
    "in place": lambda: Counting(lambda state: state),
    "state_dict": lambda: Loader(lambda state: state),
    "none": lambda: range(20),
    "grain": lambda: grain.MapDataset.range(20).to_iter_dataset(),
    "hugging_face": lambda: datasets.Dataset.from_dict({"i": range(20)}).to_iterable_dataset(),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("num_taken, is_peeked", [(0, False), (0, True), (5, True)])
def test_the_position_is_that_of_the_batch_taken_last(make, num_taken, is_peeked):
    source = started(make(), 20)
    take(source, num_taken)
    position = source.position
    kept = json.dumps(to_plain(position, "position"))
    take(source, 3)
    source.close()
    assert json.dumps(to_plain(position, "position")) == kept  # a copy, which nobody changes
    for _ in range(2):  # nor an iterator that has resumed from it
        resumed = Source(make(), put)
        if is_peeked:
            assert resumed.peek() in (0, {"i": 0})
        position = from_plain(json.loads(kept))
        resumed.move_to(position)
        assert resumed.position == position
        resumed.start(3)
        assert take(resumed, 3) == [*range(num_taken, num_taken + 3)]
        assert resumed.position["num_taken"] == num_taken + 3


def test_the_position_before_the_first_batch_is_where_the_iterator_was():
    moved = Counting()
    moved.set_state({"epoch": {"next": 5}})
    assert take(started(Counting(), 2, Source(moved, put).position), 2) == [5, 6]


def test_batches_without_a_position_are_read_again_with_a_loud_notice(caplog):
    assert take(started(iter(range(9)), 1, {"num_taken": 4}), 1) == [4]
    (said,) = caplog.records
    assert (said.levelname, "replaying 4 batches" in said.getMessage()) == ("WARNING", True)


def test_batches_come_in_their_order_from_another_thread_and_no_more_than_the_run_needs():
    threads, batches = [], iter(range(10))
    source = Source(batches, lambda x: threads.append(threading.current_thread()) or x)
    assert source.peek() == 0
    source.start(4)
    assert [next(source) for _ in range(4)] == [0, 1, 2, 3]
    assert threading.main_thread() not in threads
    source.close()
    assert next(batches) == 4


def test_no_more_is_read_ahead_than_there_is_room_for():
    arrived, read = threading.Semaphore(0), []

    def batches():
        for i in itertools.count():
            read.append(i)
            arrived.release()
            yield i

    source = started(batches(), 100)
    for _ in range(DEPTH + 1):
        assert arrived.acquire(timeout=10)  # those that wait, and one in the hand of the thread
    assert not arrived.acquire(timeout=0.2)
    source.close()
    assert read == list(range(DEPTH + 1))


def test_what_goes_wrong_while_reading_ahead_is_raised_where_the_batch_was_to_be_taken():
    def batches():
        yield 0
        raise ZeroDivisionError("in the user's own code")

    source = started(batches(), 5)
    assert take(source, 1) == [0]
    with pytest.raises(ZeroDivisionError) as caught:
        next(source)
    assert "batches" in [entry.name for entry in caught.traceback]  # where it happened
    for num_batches in (0, 2):
        source = started(range(num_batches), 5)
        take(source, num_batches)
        with pytest.raises(DataError, match=f"ended after {num_batches} batches"):
            next(source)


def test_an_iterator_that_waits_for_ever_does_not_hold_the_end_of_a_run():
    never = threading.Event()

    def batches():
        yield 0
        never.wait()

    source = started(batches(), 5)
    assert take(source, 1) == [0]
    source.close()
    never.set()


VALUES = [
    {0: 3, 1: {"next": None}},
    {"0": 1, 0: 2, (1, "a"): 3, None: 4, True: 5.5},
    ("a", [("b",), ()], [1.5, -0.0, 10**30], {1, 2}),
    {"state": b"\x00\xff"},
    {"@python": "[1]"},
    random.Random(3).getstate(),
    np.random.PCG64(3).state,
    [float("inf"), float("nan"), True, None, "\ud800 é"],
    OrderedDict(b=1, a=2),
    {"x": np.int64(3), "y": np.float32(0.1), "flag": np.bool_(True)},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_equal(value):
    found = from_plain(json.loads(json.dumps(to_plain(value, "state"))))
    assert found == value or repr(found) == repr(value)  # NaN
    assert type(found) is type(value) or isinstance(value, dict)


HOLDS_ITSELF = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
OTHERS = [{1, object()}, {"x": [jnp.ones(2)]}, object(), {"x": np.ones(2)}, {0: np.ones(())}]


@pytest.mark.parametrize("value", [*OTHERS, HOLDS_ITSELF], ids=range(6))
def test_other_values_are_refused_in_one_line(value):
    with refused(ConfigError, "^extra= "):
        to_plain(value, "extra=")


rng = np.random.default_rng(0)
NOISE = rng.standard_normal((4, 3), np.float32)
ALIKE = {
    "constant": {"x": np.ones((8, 32, 32, 3), np.float32)},  # synthetic
    "one row": {"x": np.repeat(NOISE[:1], 80, 0), "y": np.zeros(80)},  # again and again
    "few": {"x": np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), "y": np.array([0, 1, 1, 0])},  # all
    "no rows": {"x": np.zeros((0, 3), np.float32)},
    "a scalar": {"x": np.float32(3)},
    "nothing": (),
}
DIFFERENT = {
    "floats": {"x": rng.standard_normal((8, 30), np.float32)},
    "one row": {"x": rng.standard_normal((1, 8, 8), np.float32)},  # a large one of each process
    "bits": (rng.integers(2, size=(64, 8)), np.ones(64)),
    "on a device": {"x": jax.numpy.asarray(np.concatenate([NOISE] * 9))},
    "bfloat16": {"x": jax.numpy.arange(96, dtype=jax.numpy.bfloat16)},
}


@pytest.mark.parametrize("batch", ALIKE.values(), ids=ALIKE)
def test_rows_that_are_alike_or_few_and_small_show_nothing(batch):
    assert digest_of_rows(batch) == ""


@pytest.mark.parametrize("batch", DIFFERENT.values(), ids=DIFFERENT)
def test_other_rows_have_a_digest_which_no_other_batch_has(batch):
    digest = digest_of_rows(batch)
    assert digest == digest_of_rows(jax.tree.map(lambda x: x[:], batch)) != ""
    changed = jax.tree.map(lambda x: x[:-1], batch)
    assert digest not in (digest_of_rows(changed), digest_of_rows({"other": batch}))


def test_batches_read_the_share_of_their_process_without_a_look_for_devices(monkeypatch):
    """Once JAX has joined a job; its devices are not started for this."""
    rows = {"x": np.arange(24)}
    for name in ("devices", "process_index", "process_count"):
        monkeypatch.setattr(jax, name, mock.Mock(side_effect=AssertionError))

    def shares(**given):
        made = TrainBatches(rows, global_batch_size=8, seed=0, **given)
        return [made.share, eval_batches(rows, global_batch_size=8, **given).share]

    assert shares() == [Share(0, 1)] * 2
    monkeypatch.setattr(coordination, "num_processes", lambda: 4)
    monkeypatch.setattr(coordination, "process_index", lambda: 3)
    assert shares() == [Share(3, 4)] * 2
    assert shares(process_index=1) == [Share(1, 4)] * 2
    assert shares(process_index=0, num_processes=1) == [Share(0, 1)] * 2
    mine = next(TrainBatches(rows, global_batch_size=8, order=Order(24, 0, shuffle=False)))
    assert mine["x"].tolist() == [6, 7]
    with pytest.raises(ConfigError, match="process_index=3 must be from 0 up, and below num_pro"):
        shares(num_processes=2)
