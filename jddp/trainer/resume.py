"""The beginning of a run that resumes: the newest checkpoint, and the records up to its step."""

import json

import jax

from jddp.checkpoint.plain import from_plain, to_plain
from jddp.data.periods import Reached
from jddp.distributed.coordination import from_first
from jddp.engine.state import is_float
from jddp.errors import FileSystemError
from jddp.trainer.loop import POSITION, Loop
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.resume_notes import (
    changed_decoders,
    changed_rate,
    changed_settings,
    differences,
    length_before,
)
from jddp.trainer.run import Run
from jddp.trainer.same_program import SameProgram
from jddp.trainer.saving import BEST
from jddp.trainer.watching import EarlyStopping, judge_again
from jddp.typing import JsonObject

SECONDS = 600.0  # for process 0 to read the file of records


def resume(loop: Loop) -> None:
    """Restores the newest checkpoint, if there is one, and drops the records of later steps."""
    run = loop.run
    restored = None
    if loop.files is not None:
        to_plain(loop.position, POSITION)  # Refused now, and not when a checkpoint is due.
        restored = loop.saving.restore(run.state)
        loop.program = SameProgram(loop.ddp, run.state, loop.source.peek(), loop.about)
    if restored is None:
        _count_steps(loop)
    else:
        run.step = restored.step
        run.state = restored.state
        try:
            _restore_from(loop, restored.beside)
            before = [EarlyStopping(**x) for x in restored.beside.get("early_stopping", [])]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FileSystemError(
                f"{run.run_dir} holds, at step {run.step}, a run.json that this version of jddp "
                f"cannot read: {error!r}. Choose another run.dir."
            ) from error
    recorded = [] if loop.files is None else _resume_records(run, loop.files)
    if restored is not None:
        # Records may have been lost; and the checkpoint came before the evaluation of its step.
        last = recorded[-1]["step"] if recorded else -1
        run.evaluations = recorded + [x for x in run.evaluations if x["step"] > last]
        # A checkpoint knows the best ones; that of its own step, which came later, may be there.
        best = {*run.checkpoints, *(f"{BEST}/{x}" for x in restored.beside.get("best", []))}
        run.lost = {x["step"] for x in run.evaluations if f"{BEST}/{x['step']}" not in best}
        loop.notes.insert(0, f"resumed from step {run.step} of {loop.plan.num_steps}")
        if judge_again(run, loop.plan.callbacks, before):
            loop.notes.append("early stopping has changed: the run it had stopped continues")


def _restore_from(loop: Loop, beside: JsonObject) -> None:
    """Restores the values that were saved beside the state."""
    run = loop.run
    run.stopped = beside["stopped"]
    loop.numerics.restore(tuple(beside["skipped"]))
    loop.numerics.updates = beside.get("updates", run.step - 1)  # none of an earlier version
    loop.spikes.restore(beside.get("losses", []))  # none of an earlier version
    run.metrics = dict(beside["metrics"])
    run.evaluations = [x for x in beside["evaluations"] if x["step"] <= run.step]
    in_another_world = _compare_worlds(loop, beside["world"])  # while the first batch is there
    loop.position = from_plain(beside["position"])
    loop.reached = loop.source.reached(run.step, loop.position)
    loop.before = Reached(*beside.get("before", [run.step - 1]))  # none of an earlier version
    loop.source.move_to(loop.position)
    _count_steps(loop)
    before = beside.get("learning_rate")
    keep = length_before(loop.about["config"], beside.get("plan", {}))
    now = loop.reporter.learning_rate()
    notes = [changed_settings(beside, loop.about), changed_rate(run.step, before, now, keep)]
    notes.append(changed_decoders(beside, loop.about))
    if loop.program is not None:
        notes.insert(0, loop.program.compare(run.step, beside, loop.plan.resume))
    loop.notes += filter(None, [*notes, in_another_world])


def _compare_worlds(loop: Loop, before: JsonObject) -> str | None:
    """A note on a topology that differs from the checkpoint's, or None."""
    now = loop.ddp.steps.topology
    if before == now:
        return None
    draws = loop.ddp.steps.planned(loop.source.peek()).uses_rng
    stateful = any(map(is_float, jax.tree.leaves(loop.run.state.model_state)))
    return differences(
        before,
        now,
        uses_rng=draws,
        has_statistics=stateful,
        has_order=loop.source.resumes_exactly,
    )


def _count_steps(loop: Loop) -> None:
    """Counts the steps of some epochs, which end with their last example."""
    if loop.plan.num_epochs is not None:
        loop.set_length(loop.run.step + loop.source.num_left)


def _resume_records(run: Run, files: RunDirectory) -> list[JsonObject]:
    """Drops records of later steps; returns the remaining evaluations, the same on all processes.

    Only process 0 reads the file.

    Raises:
      FileSystemError: If it cannot be read or written.
    """
    kept = files.metrics.resume_at(run.step)
    size, evaluations = json.loads(from_first("records", json.dumps(kept), timeout_seconds=SECONDS))
    step = run.step
    read = files.metrics.read
    run.read_earlier = lambda: [record for record in read(size) if record["step"] <= step]
    return list(evaluations)
