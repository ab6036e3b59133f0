"""Of processes that wait for each other, the one is found for which the others wait."""

import json

import pytest

import jddp.distributed.coordination as job
from jddp.trainer.timing import Clock, Processes, Spent, find_slowest


def own(data=0.01, devices=1.0, host=0.02):
    return Spent(data + devices, data, devices, host)


# Process 1 takes 0.5 s longer; the others have this as time on devices.
SLOW = {
    "data": [own(devices=1.5), own(data=0.51), own(devices=1.5)],
    "host": [own(devices=1.5), own(host=0.52), own(devices=1.5)],
}


@pytest.mark.parametrize("phase", SLOW)
def test_the_process_that_is_slow_is_found_and_not_those_that_wait_for_it(phase):
    found = find_slowest(SLOW[phase])
    assert (found.process, found.phase) == (1, phase)
    assert found.ratio == pytest.approx(1.53 / 1.03)
    assert find_slowest([own(), own()]).ratio == 1


def test_a_process_is_reported_once_it_is_slow_in_three_records_in_a_row(monkeypatch):
    store, notes, fields = {}, [], []
    processes = Processes(notes.append)
    assert processes.compare(own()) == {}  # alone
    monkeypatch.setattr(job, "num_processes", lambda: 3)
    monkeypatch.setattr(job, "try_publish", store.__setitem__)
    monkeypatch.setattr(job, "unpublish", lambda name: [store.pop(f"{name}/{i}") for i in range(3)])
    monkeypatch.setattr(
        job,
        "published",
        lambda name: {int(key[-1]): x for key, x in store.items() if key[:-2] == name},
    )
    slow, alike = SLOW["data"], [own(), own(), own()]
    for of_all in [slow, slow, alike, slow, slow, slow, slow, SLOW["host"], alike, alike]:
        fields.append(processes.compare(of_all[0]))  # waits for nothing
        name = max(store, key=lambda key: int(key.split("/")[-2])).rpartition("/")[0]
        for number, x in enumerate(of_all):
            store[f"{name}/{number}"] = json.dumps(["node3", x])
        assert len(notes) == (len(fields) > 7)  # two records behind the third in a row
    assert fields[:2] == [{}, {}]
    assert fields[2].keys() == {f"slowest_{x}" for x in ("process", "host", "phase", "ratio")}
    assert [x["slowest_phase"] for x in fields[5:9]] == ["data"] * 4
    assert notes[0].startswith("process 1 on node3 is 1.5 times slower than the others, in data")
    assert len(store) == 6  # earlier ones are removed


def test_a_clock_tells_waiting_from_the_host_and_from_pauses(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock(0)

    def spend(seconds):
        now[0] += seconds

    assert clock.spent(0) is None
    for _ in range(2):
        with clock.measure("data"):
            spend(1.0)
        with clock.measure("devices"):
            spend(4.0)
        spend(0.5)
        with clock.measure("pause"):
            spend(2.0)  # saving
            with clock.measure("devices"):
                spend(8.0)  # evaluation
    assert clock.spent(2) == Spent(step=5.5, data=1.0, devices=12.0, host=2.5)
    spend(1.0)
    assert clock.spent(3) == Spent(step=1.0, data=0.0, devices=0.0, host=1.0)
