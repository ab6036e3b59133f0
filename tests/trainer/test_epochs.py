"""Evaluations, records and checkpoints by epoch, also where a batch has examples of two epochs."""

import pytest
from runs import records
from tiny import make_batch

import jddp
from jddp.checkpoint.folders import finished
from jddp.data import Epochs, TrainBatches
from jddp.ground.errors import ConfigError

NUM_EXAMPLES = 20
ENDS = {3: 1.2, 5: 2.0, 8: 3.2}  # of three epochs, with eight examples a step: 24, 40 and 64
EACH = {"eval_every_steps": Epochs(1), "log_every_steps": Epochs(1), "save_every_steps": Epochs(1)}


def fit(plain, run_dir=None, num_steps=9, size=8, **options):
    batches = TrainBatches(make_batch(NUM_EXAMPLES), global_batch_size=size, seed=0)
    options = {"evaluate": [make_batch(6, seed=9)], "keep": 9, **EACH, **options}
    return jddp.fit(plain, batches, num_steps=num_steps, run_dir=run_dir, **options)


def epochs_of(run, split):
    return {x["step"]: x["epoch"] for x in run.history if x["split"] == split}


def test_all_is_due_after_the_first_step_that_completes_an_epoch(plain, tmp_path):
    run = fit(plain, tmp_path)
    assert epochs_of(run, "eval") == epochs_of(run, "train") == {**ENDS, 9: 3.6}
    assert finished(tmp_path / "checkpoints") == [*ENDS, 9]
    assert records(tmp_path)[0]["epoch"] == 1.2


def test_periods_in_steps_and_in_parts_of_an_epoch_stand_side_by_side(plain):
    run = fit(plain, eval_every_steps=Epochs(1.5), log_every_steps=4)
    assert epochs_of(run, "eval") == {4: 1.6, 8: 3.2, 9: 3.6}
    assert epochs_of(run, "train") == {4: 1.6, 8: 3.2, 9: 3.6}
    assert [*epochs_of(fit(plain, eval_every_steps=Epochs(0.5)), "eval")] == [2, 3, 4, 5, 7, 8, 9]


def test_the_padding_of_a_last_batch_is_no_part_of_an_epoch(plain):
    given = {"global_batch_size": 12, "num_epochs": 2, "evaluate": make_batch(6), **EACH}
    run = jddp.fit(plain, make_batch(NUM_EXAMPLES), **given)
    assert epochs_of(run, "eval") == {2: 1.2, 4: 2.0}


class BreakOff(jddp.Callback):
    """Breaks off at the save of a step, before its evaluation."""

    def on_save(self, run):
        if run.step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("size", [2, 8, 16])
def test_an_evaluation_that_was_interrupted_is_repeated_whatever_the_batch_size(
    plain, tmp_path, size
):
    with pytest.raises(KeyboardInterrupt):
        fit(plain, tmp_path, callbacks=[BreakOff()])
    run = fit(plain, tmp_path, size=size, num_steps=4)
    assert epochs_of(run, "eval") == {3: 1.2, 4: 1.2 + size / NUM_EXAMPLES}


@pytest.mark.parametrize("size, ends", [(4, {6: 2.0, 11: 3.0}), (12, {5: 2.2, 6: 2.8})])
def test_a_run_that_resumes_with_another_batch_size_keeps_the_schedule(plain, tmp_path, size, ends):
    fit(plain, tmp_path, num_steps=4)
    run = fit(plain, tmp_path, num_steps=max(ends), size=size)
    assert epochs_of(run, "eval") == {3: 1.2, 4: 1.6, **ends}


def test_batches_that_know_no_epochs_are_refused_with_the_way_out(plain):
    message = r"eval_every_steps=Epochs\(.*0.5\): these batches know no epochs"
    with pytest.raises(ConfigError, match=message):
        jddp.fit(plain, [make_batch(8)] * 2, num_steps=2, eval_every_steps=Epochs(0.5))
