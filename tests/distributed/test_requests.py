"""What any process asks for, all do at the same call."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp

from jddp.distributed import coordination, requests
from jddp.distributed.coordination import awaiting, computing, is_waiting_for
from jddp.distributed.requests import Request, Requests

NUM_PROCESSES, NUM_CALLS = 3, 40


class Job:
    """The coordination service of a job whose processes are threads."""

    def __init__(self):
        self.values, self.changed, self.uses = {}, threading.Condition(), {}
        self.me = threading.local()

    def num_processes(self):
        return NUM_PROCESSES

    def process_index(self):
        return self.me.number

    def is_connected(self):
        return True

    def try_publish(self, name, value):
        with self.changed:
            self.values.setdefault(name, value)
            self.changed.notify_all()

    def try_read(self, name, timeout_seconds):
        with self.changed:
            self.changed.wait_for(lambda: name in self.values, min(timeout_seconds, 0.05))
            return self.values.get(name)

    def gather(self, key, value, *, timeout_seconds):
        use = self.uses[key, self.me.number] = self.uses.get((key, self.me.number), 0) + 1
        names = [(key, use, number) for number in range(NUM_PROCESSES)]
        self.try_publish(names[self.me.number], value)
        with self.changed:
            assert self.changed.wait_for(lambda: all(x in self.values for x in names), 20)
        return [self.values[name] for name in names]

    def background(self, step):
        number = self.me.number

        def named_step():
            self.me.number = number
            return step()

        return coordination.background(named_step)


def run(monkeypatch, of_process):
    """The results of a function of each process's number and requests, for all processes."""
    job = Job()
    monkeypatch.setattr(requests, "service", job)
    all_requests = [Requests() for _ in range(NUM_PROCESSES)]
    for each in all_requests:
        each._key = "same"

    def process(number):
        job.me.number = number
        with all_requests[number]:
            return of_process(number, all_requests[number])

    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        return list(threads.map(process, range(NUM_PROCESSES)))


def test_what_one_process_asks_all_do_at_one_call_whatever_their_pace(monkeypatch):
    def of_process(number, asking):
        random_of_process = random.Random(number)
        done = {}
        for call in range(NUM_CALLS):
            if random_of_process.random() < 0.3:
                asking.ask(Request("stop", f"{number} at {call}"))
            time.sleep(random_of_process.random() / 500)
            if found := asking.due():
                done[call] = found
        done["last"] = asking.last()
        return done

    first, *others = run(monkeypatch, of_process)
    assert others == [first] * (NUM_PROCESSES - 1)
    asked = [request.value for found in first.values() for request in found]
    assert len(asked) == len(set(asked))
    for number in range(NUM_PROCESSES):
        draws = random.Random(number)
        expected = []
        for call in range(NUM_CALLS):
            expected += [f"{number} at {call}"] * (draws.random() < 0.3)
            draws.random()
        assert [what for what in asked if what.startswith(f"{number} at")] == expected


def test_what_is_asked_after_the_last_step_is_done_at_the_end(monkeypatch):
    def of_process(number, asking):
        asking.due()
        if number == 1:
            asking.ask(Request("save", "end"))
        return asking.last()

    assert run(monkeypatch, of_process) == [[Request("save", "end")]] * NUM_PROCESSES


def test_a_process_alone_does_at_its_next_call_what_it_asks():
    with Requests() as asking:
        assert asking.due() == []
        asking.ask(Request("stop"))
        assert [asking.due(), asking.due(), asking.last()] == [[Request("stop")], [], []]


def test_a_wait_is_seen_while_it_lasts_by_the_processes_that_it_is_for():
    assert not is_waiting_for({0, 1})
    with awaiting({1, 2}):
        assert is_waiting_for({0, 1})
        assert not is_waiting_for({0, 3})
    with computing({"x": jnp.ones(3), "name": 1}):  # whose devices are all of this process
        assert not is_waiting_for({0, 1})
    assert not is_waiting_for({1})
