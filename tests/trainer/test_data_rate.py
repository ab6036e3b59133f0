"""The dry run and the doctor say whether the data keep up with the step."""

import itertools
from types import SimpleNamespace

import pytest

from jddp.commands import doctor
from jddp.config.files import load_config
from jddp.trainer.job import data_rate
from jddp.trainer.job.build import build
from jddp.trainer.job.data_rate import DataRate, measure_data_rate


@pytest.mark.parametrize(
    ("read", "needed", "num_workers", "words"),
    [
        (5000, 2800, 0, "a thread reads 5,000 images/s, a step takes 2,800: no workers needed"),
        (410, 700, 3, "a thread reads 410 images/s, a step takes 700: data.num_workers=3"),
        (100, 20_000, 250, "that takes 250 workers, and this host has 8 cores. Store examples"),
        (100, None, 0, "a thread reads 100 images/s; the step was not timed"),
    ],
)
def test_the_number_of_workers_follows_from_both_rates(read, needed, num_workers, words):
    rate = DataRate("images", read, needed, num_cores=8)
    assert rate.num_workers == num_workers
    assert words in str(rate)


def job_of(*overrides):
    config, _ = load_config(["fashion_mnist_cnn"], ["mesh.num_devices=2", *overrides])
    return build(config)


def test_reading_is_counted_in_examples_of_this_process(monkeypatch):
    ticks = itertools.count(0, 0.5)  # of a clock that is read before each batch
    monkeypatch.setattr(data_rate, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    step = SimpleNamespace(seconds=lambda: 0.25, memory=SimpleNamespace(fits=True))
    monkeypatch.setattr(data_rate, "TimedStep", lambda job: step)
    rate = measure_data_rate(job_of("data.global_batch_size=64"))
    assert rate.noun == "images"
    assert rate.read == 64 * 3 / 2.0  # at 0.5, 1.0 and 1.5 s; at 2.0 it ends
    assert rate.needed == 64 / 0.25


def test_a_step_that_takes_minutes_on_cpus_is_not_timed(monkeypatch):
    monkeypatch.setattr(data_rate, "SECONDS", 0)
    monkeypatch.setattr(data_rate, "MOST_FLOPS", 10)
    assert measure_data_rate(job_of()).needed is None


def test_the_doctor_compares_the_rates_of_a_config(monkeypatch, capsys):
    monkeypatch.setattr(data_rate, "SECONDS", 0)
    assert doctor.main(["--config", "fashion_mnist_cnn"]) == 0
    assert " images/s, a step takes " in " ".join(capsys.readouterr().out.split())
