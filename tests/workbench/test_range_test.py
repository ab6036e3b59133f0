"""A range test suggests a learning rate from losses at rising rates, and keeps nothing."""

import math

import numpy as np
import pytest
from workers.search import config

from jddp.commands.training import run
from jddp.config.files import with_overrides
from jddp.ground.errors import ExitCode, UsageError
from jddp.trainer.job.parts import optimizer_of
from jddp.workbench.range_test import FIRST, LAST, NUM_STEPS, RangeTest, find_rate, rising

RATES = tuple(np.geomspace(FIRST, LAST, NUM_STEPS).tolist())


def test_a_single_low_loss_is_noise_and_a_tenth_of_the_rate_of_the_lowest_is_suggested():
    losses = [2.3 - 1.5 * math.exp(-(math.log10(rate / 0.1) ** 2)) for rate in RATES]
    found = RangeTest(RATES, tuple(losses))
    assert math.isclose(found.suggestion, 0.01, rel_tol=0.2)
    assert max(map(len, str(found).splitlines()[:-1])) <= 80
    losses = [2.3] * 30 + [1.9] + [2.3 - 0.02 * i for i in range(60)] + [5.0] * 9
    assert RangeTest(RATES, tuple(losses)).lowest > 85


@pytest.mark.parametrize("above", [-100.0, 0.0, 2.3, 1000.0])
def test_a_fall_is_judged_by_the_noise_of_the_losses_wherever_they_lie(above):
    noise = 0.1 * np.random.default_rng(0).normal(size=(20, NUM_STEPS))
    falling = -2 * np.clip(np.linspace(-2, 1, NUM_STEPS), 0, 1)
    for row in above + noise:
        assert RangeTest(RATES, tuple(row + falling)).suggestion is not None
        assert RangeTest(RATES, tuple(row)).suggestion is None
        assert str(RangeTest(RATES, tuple(row))).endswith("the loss has not fallen")


def test_the_rates_rise_from_the_first_to_the_last_and_groups_keep_their_ratio(tmp_path):
    groups = {"kernels": {"patterns": ["*kernel"], "learning_rate": 0.2}}
    optimizer = {"learning_rate": 0.1, "groups": groups, "warmup_steps": 5}
    made = rising(with_overrides(config(tmp_path), {"optimizer": optimizer}))
    _, rate = optimizer_of(made, NUM_STEPS)
    assert np.allclose([float(rate(i)) for i in range(NUM_STEPS)], RATES, rtol=1e-4)
    assert math.isclose(made.optimizer.groups["kernels"].learning_rate, 2 * FIRST)
    assert made.run.dir is None


@pytest.mark.usefixtures("started_devices")
def test_a_job_is_tested_until_its_loss_diverges_and_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = find_rate(config(tmp_path / "runs"))
    assert len(found.rates) < NUM_STEPS
    assert 0.001 < found.suggestion < 1.0
    assert "stopped at step" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


LARGE = """
from workers import mine

def points():
    return tuple({name: 30 * x for name, x in rows.items()} for rows in mine.points())
"""


@pytest.mark.usefixtures("started_devices")
def test_float16_which_skips_steps_first_suggests_the_rate_of_float32(tmp_path, monkeypatch):
    """Its first loss scales are too large for gradients of a thousand."""
    (tmp_path / "large.py").write_text(LARGE)
    monkeypatch.syspath_prepend(tmp_path)
    large = with_overrides(config(tmp_path), {"data.target": "large:points"})
    exact = find_rate(large)
    found = find_rate(with_overrides(large, {"ddp.precision": "float16"}))
    # Ten skipped steps are a factor of six; other batches and roundings are less than two.
    assert 0.5 < found.suggestion / exact.suggestion < 2
    np.testing.assert_allclose(found.rates[0], FIRST, rtol=1e-4)


def test_what_has_no_schedule_to_replace_is_refused(tmp_path, monkeypatch, capsys):
    own = with_overrides(config(tmp_path), {"optimizer.kwargs.learning_rate": 0.1})
    with pytest.raises(UsageError, match="optimizer.kwargs.learning_rate. Remove that key"):
        find_rate(own)
    assert run(["--find-rate", "--sweep", "seed=0,1"]) == ExitCode.USAGE
    assert "exclude each other" in capsys.readouterr().err
