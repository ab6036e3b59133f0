"""Batches on their way to the loop: read ahead, counted where they are taken, resumed exactly."""

import itertools
import json
import threading

import datasets
import grain
import pytest

from jddp.ground.errors import DataError
from jddp.trainer.prefetch import DEPTH, Source
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
    """An iterator that knows its position, as grain's do."""

    def __init__(self, kind=int):
        self.i, self.kind = 0, kind

    def __iter__(self):
        return self

    def __next__(self):
        self.i += 1
        return self.i - 1

    def get_state(self):
        return str(self.i).encode() if self.kind is bytes else {"next": self.i}

    def set_state(self, state):
        self.i = int(state) if self.kind is bytes else state["next"]


class InPlace(Counting):
    """An iterator whose position is one nested dict, which it changes in place and hands out."""

    def __init__(self):
        self.given = {"epoch": {"next": 0}}

    def __next__(self):
        self.given["epoch"]["next"] += 1
        return self.given["epoch"]["next"] - 1

    def get_state(self):
        return self.given

    def set_state(self, state):
        self.given = state


class Loader:
    """An iterable that knows its position in place, as torchdata's loaders do."""

    def __init__(self):
        self.given = {"epoch": {"next": 0}}

    def __iter__(self):
        for i in itertools.count(self.given["epoch"]["next"]):
            self.given["epoch"]["next"] = i + 1
            yield i

    def state_dict(self):
        return self.given

    def load_state_dict(self, state):
        self.given = state


MAKERS = {
    "states": Counting,
    "bytes": lambda: Counting(bytes),
    "in place": InPlace,
    "state_dict": Loader,
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
    moved.set_state({"next": 5})
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
