"""A run reports examples, tokens, FLOPs and memory per second of what its steps do."""

import logging
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from tiny import make_batch, wrapped

import jddp
from jddp.ground.typing import RESERVED
from jddp.inspection import flops
from jddp.inspection.memory import limit_bytes, peak_bytes
from jddp.trainer import reporter
from jddp.trainer.reporter import Clock, Spent, Work, measure
from jddp.trainer.reports.lines import summary

# Two layers of 16 x 16 and 16 x 4, of which the first has no gradient of its inputs.
FLOPS_PER_ROW = 2 * (2 * 16 * 16 + 3 * 16 * 4)


@pytest.fixture
def gpu(monkeypatch):
    """A peak rate of CPUs, and statistics of their memory."""
    monkeypatch.setitem(flops.PEAKS, "cpu", (0, 0, 1e-6, 0))  # a million a second
    monkeypatch.setattr(reporter, "peak_bytes", lambda devices: 3 * 2**30)
    monkeypatch.setattr(reporter, "limit_bytes", lambda devices: 4 * 2**30)


def test_records_have_rates_and_the_end_a_line_of_them(gpu, capsys, caplog):
    ddp = wrapped(accumulate_steps=2)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run = jddp.fit(ddp, [make_batch(8)] * 3, num_steps=3, log_every_steps=1)
    first, second, last = run.history
    assert "mfu" not in first  # which was compiled
    assert second.keys() - {"accuracy"} <= {*RESERVED}
    seconds = second["step_seconds"]
    assert second["examples_per_second"] * seconds == pytest.approx(8)
    assert second["model_flops_per_second"] * seconds == pytest.approx(8 * FLOPS_PER_ROW)
    assert second["mfu"] * seconds == pytest.approx(8 * FLOPS_PER_ROW / 1e6 / 2)
    predicted = jddp.memory(ddp, make_batch(8)).total
    assert second["predicted_memory_bytes"] == pytest.approx(predicted, rel=0.2)
    assert (last["peak_memory_bytes"], "tokens_per_second" in last) == (3 * 2**30, False)
    assert last["memory_limit_bytes"] == 4 * 2**30
    end = capsys.readouterr().out.splitlines()[-1]
    assert end.startswith("median ")
    assert "FLOP/s, MFU " in end
    assert end.endswith("peak memory 3.0 GiB (0.0 predicted)")
    compiled = [x for x in caplog.messages if "Compiling jit(step)" in x]
    assert len(compiled) == 1, caplog.messages  # and not a second time for the prediction


def test_examples_are_images_or_tokens_by_the_names_of_their_arrays():
    def work(num_entries, **batch):
        found = Work((), 4, {})
        reporter._name_examples(found, batch, num_entries)
        rates = found.rates({"step_seconds": 1.0, "count": 30.0}, 4)
        return found.unit, rates.get("tokens_per_second")

    tokens = np.zeros((4, 9), np.int32)
    assert work(4, image=np.zeros((4, 8, 8, 3))) == ("images", None)
    assert work(32, tokens=tokens) == ("ex", 30)  # predicted ones that are not masked
    assert work(4, input_ids=tokens) == ("ex", 36)  # with one loss for a row
    assert work(4, inputs=np.zeros((4, 9), np.float32)) == ("ex", None)
    assert work(4, x=tokens) == ("ex", None)


def test_a_step_that_cannot_be_counted_has_no_flops_and_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(reporter, "count_flops", mock.Mock(side_effect=NotImplementedError))
    ddp = wrapped()
    work = measure(ddp, ddp.shard_batch(make_batch(8)))
    assert work.rates({"step_seconds": 2.0, "count": 8.0}, 8) == {"examples_per_second": 4}
    (message,) = caplog.messages
    assert message.startswith("The FLOPs of a step are not reported")


def test_rates_of_a_batch_of_another_size_are_those_of_its_rows():
    work = Work((), 8, {"examples_per_second": 8, "mfu": 0.5}, has_token_losses=True)
    half = {"examples_per_second": 2, "tokens_per_second": 7.5, "mfu": 0.125}
    assert work.rates({"step_seconds": 2.0, "count": 15.0}, 4) == half


def test_kernels_that_no_trace_shows_are_named(monkeypatch, caplog):
    monkeypatch.setattr(reporter, "uncounted", lambda traced: {"while", "pallas_call"})
    assert measure(wrapped(), make_batch(8)).per_step["model_flops_per_second"] == 8 * FLOPS_PER_ROW
    assert caplog.messages == ["A step has more FLOPs than are reported, in pallas_call, while."]


def test_peak_memory_is_that_of_the_fullest_device():
    stats = {"peak_bytes_in_use": 2, "bytes_limit": 5}, {"peak_bytes_in_use": 3, "bytes_limit": 4}
    given, silent = (
        [SimpleNamespace(memory_stats=lambda x=x: x) for x in each] for each in (stats, (None, {}))
    )
    assert (peak_bytes(given), limit_bytes(given)) == (3, 4)
    assert peak_bytes(silent) is limit_bytes(silent) is None
    record = {"peak_memory_bytes": 62.1 * 2**30, "predicted_memory_bytes": 60 * 2**30}
    assert summary(record, "ex") == "peak memory 62.1 GiB (60.0 predicted)"
    assert summary(record | {"predicted_memory_bytes": None}, "ex") == "peak memory 62.1 GiB"


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
    assert clock.spent(2) == Spent(step=5.5, data=1.0, host=2.5)
    spend(1.0)
    assert clock.spent(3) == Spent(step=1.0, data=0.0, host=1.0)
