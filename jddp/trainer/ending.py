"""The end of a run: after its last step, at a signal, or after an exception."""

import contextlib
import logging

import jax

from jddp.distributed.coordination import from_first
from jddp.distributed.exits import ending_forked_children
from jddp.ground.errors import FileSystemError, NumericsError, ReplicaMismatchError
from jddp.ground.names.plugins import RUN_ENDED, added
from jddp.trainer.loop import Interrupted, Loop
from jddp.trainer.run import call_each
from jddp.trainer.saving import LATEST

log = logging.getLogger("jddp")

# After these errors the newest state must not be saved.
RUINED = (NumericsError, ReplicaMismatchError, jax.errors.JaxRuntimeError)
SECONDS = 600.0  # for process 0 to write the remaining records


def run_to_the_end(loop: Loop) -> None:
    """Takes steps until all are done, a callback stops the run, or a signal interrupts it."""
    run = loop.run
    begun_at = run.step
    num_steps = loop.num_steps
    if run.step > num_steps:
        loop.reporter.note(f"num_steps={num_steps}: the run is at step {run.step} already")
    if loop.is_over and loop.is_evaluated:
        how = "finished" if run.stopped is None else f"stopped ({run.stopped})"
        loop.reporter.note(f"{how} at step {run.step}; nothing to do")
        if run.evaluations:
            loop.reporter.progress.log(run.eval_metrics)
        loop.reporter.report_best()
        return
    files = loop.files
    log_file = contextlib.nullcontext() if files is None else files.logging(jax.process_index())
    with log_file, loop.requests:
        try:
            with ending_forked_children():
                loop.begin()
                loop.take_steps()
                loop.end()
        except Interrupted:
            _leave(loop)
        except KeyboardInterrupt:  # the second one, to leave at once
            raise
        except BaseException as error:
            if run.step > begun_at and not isinstance(error, RUINED):
                _save_after(loop, error)
            _call_on_exception(loop, error)
            raise


def _call_on_exception(loop: Loop, error: BaseException) -> None:
    try:
        call_each(loop.options.callbacks, lambda callback: callback.on_exception(loop.run, error))
    except (Exception, SystemExit) as later:  # the error that ends the run is to be raised
        log.error("A callback has failed in on_exception: %r", later, exc_info=later)


def _leave(loop: Loop) -> None:
    """Saves the state at a signal, for a later process to resume from."""
    loop.run.interrupted = loop.signal
    if loop.files is None:
        note = f"{loop.signal}: stopped after step {loop.run.step}"
        loop.reporter.note(note, "signal", step=loop.run.step)
    else:
        note = f"{loop.signal}: {_saved(loop)}, from which the same call resumes"
        _save_here(loop, note, "signal")


def _save_after(loop: Loop, error: BaseException) -> None:
    """Saves the state after an exception of a callback, an evaluation or the data.

    The step that was sent last is reported too, even without a run directory. An exit
    (`sys.exit`) of a callback is an exception like any other.

    Saving needs all processes of a job. If all of them fail at the same step, for example in the
    same callback or evaluation, they save together. If one fails alone, it exits at once, and the
    last checkpoint stays the newest.
    """
    if loop.run.state.step.is_deleted():
        return
    why = type(error).__name__
    # The error that ends the run is to be raised.
    with contextlib.suppress(Exception, SystemExit):
        if loop.saving.all_are_at(loop.run.step):
            loop.reporter.finish()
            loop.replica_check.finish()
            if loop.files is not None:
                rest = "fix the cause, and the same call resumes from it"
                _save_here(loop, f"{why}: {_saved(loop)}; {rest}")


def _saved(loop: Loop) -> str:
    return f"saved step {loop.run.step} of {loop.num_steps}"


def _save_here(loop: Loop, note: str, kind: str = "") -> None:
    try:
        loop.act(loop.requests.last())
        loop.save(LATEST)
    finally:  # also where a callback raises
        loop.saving.wait()
    loop.reporter.note(note, kind, step=loop.run.step)


def close(loop: Loop, *, failed: bool = False) -> None:
    """Waits for checkpoints and restores the terminal.

    After a failure it waits for no other process, and raises no second error.
    """
    loop.source.close()
    loop.profile.close()
    loop.reporter.progress.close()
    if not failed:
        loop.watchdog.enter("save", loop.run.step)
    is_raised = not (failed or loop.run.interrupted)
    try:
        loop.saving.close(failed=failed)
    except FileSystemError:
        is_raised = False
        raise
    finally:
        _tell_others(loop)
        _finish_records(loop, is_raised=is_raised)


def _tell_others(loop: Loop) -> None:
    """Writes the files that other packages make of a run; a failure is logged, and changes nothing.

    `jddp.workbench` makes report.html.
    """
    if loop.files is None or jax.process_index() != 0:
        return
    for name, make in added(RUN_ENDED):
        try:
            for file, content in make(loop.files.path, str(loop.files.where)).items():
                loop.files.folder.replace(file, [content])
        except Exception as error:
            log.warning("%s is not written: %r", name, error)


def _finish_records(loop: Loop, *, is_raised: bool) -> None:
    """Writes the remaining records.

    Raises:
      FileSystemError: On all processes, if records are lost and `is_raised`; else it is logged.
    """
    failure = None if loop.files is None else loop.files.finish()
    if is_raised:
        if text := from_first("lost", str(failure or ""), timeout_seconds=SECONDS):
            raise FileSystemError(text)
    elif failure is not None:
        log.error("%s", failure)
