"""Goes back to the checkpoint before a loss spike, and continues with the data after the spike.

    batches    1 ... 60 │ 61 62 63 │ 64 65 ...     63 makes the spike
    steps      1 ... 60 │          │ 61 62 ...
                        └─ the newest checkpoint

The batches between checkpoint and spike are left out too: the same batch is harmless in another
state, and those before it have led to this one. This is the rule of PaLM, which restarted from a
checkpoint some 100 steps before each spike, and left out 200 to 500 batches.

A run that resumes does the same: the position in a later checkpoint is behind what was left out,
and from an earlier one the run finds the spike again.

References:
  Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", JMLR 2023, section 5.1.
  https://arxiv.org/abs/2204.02311
"""

from jddp.checkpoint.checkpoints import Restored
from jddp.errors import NumericsError
from jddp.trainer.loop import Loop
from jddp.trainer.numerics import WAY_OUT, Sent, Spiked

MOST = 2  # times that a run goes back to one checkpoint


def take_steps(loop: Loop) -> None:
    """Takes the steps of a run to their end, and goes back at each spike; all processes call it.

    Raises:
      Interrupted: At a signal, before the end.
      NumericsError: If the run would go back to one checkpoint for the third time.
      FileSystemError: If there is no checkpoint to go back to.
    """
    while (spiked := _step_to_a_spike(loop)) is not None:
        _go_back(loop, spiked)


def _step_to_a_spike(loop: Loop) -> Sent | None:
    """Takes steps to a spike, and returns its step; None at the end."""
    try:
        loop.take_steps()
    except Spiked as spiked:
        return spiked.sent
    return None


def _go_back(loop: Loop, spiked: Sent) -> None:
    loop.watchdog.enter("start", loop.run.step)
    loop.replica_check.finish()
    restored = loop.saving.go_back(spiked.step, loop.run.state)
    to = restored.step
    if [step for _, step in loop.rewinds].count(to) == MOST:
        raise NumericsError(
            f"The loss jumps at step {spiked.step}, and the run has gone back to step {to} "
            f"{MOST} times. {WAY_OUT}; the checkpoint of step {to} is from before."
        )
    which = f"step {to + 1}" if spiked.step == to + 1 else f"steps {to + 1} to {spiked.step}"
    loop.reporter.note(f"back to step {to}, and on with the data after {which}")
    loop.rewinds.append((spiked.step, to))
    _move_data(loop, spiked, spiked.step - to)
    _restore(loop, restored)


def _move_data(loop: Loop, spiked: Sent, num_left_out: int) -> None:
    """Continues with the batch after a step, which the next step may have taken already."""
    if (sent := loop.reporter.forget()) is not None:
        loop.source.put_back(sent.batch, sent.position)
    loop.position = spiked.position
    if loop.plan.num_epochs is None:
        loop.source.start(num_left_out, loop.plan.num_steps - num_left_out + 1)
    else:  # whose end comes earlier
        loop.set_length(loop.plan.num_steps - num_left_out)


def _restore(loop: Loop, restored: Restored) -> None:
    run = loop.run
    run.state = restored.state
    run.step = restored.step
    # Without the batches that are left out: an epoch that ended in them ends with the next step.
    loop.reached = loop.source.reached(run.step, restored.beside["position"])
    loop.reporter.reached = loop.reached
    run.metrics = dict(restored.beside["metrics"])
    run.forget_after(run.step)
    if loop.files is not None:
        loop.files.metrics.resume_at(run.step)
    loop.numerics.restore(tuple(restored.beside["skipped"]))
    loop.spikes.restore(restored.beside["losses"])
    loop.profile.close()
