"""The beginning of a run that resumes: its newest checkpoint, and notes on changes since then.

The effect of a key, in `config.schema`, decides whether it may differ at all. `run.json` keeps
digests of the program, too, and a run that resumes compares its own. If a config allows a change
(`train.num_steps`, `checkpoint.allow_changed`), the parts that its keys describe may differ.
Another version of a package may trace the same code to different equations. Any other difference
is refused, unless `resume="changed"` continues with the new program.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import replace

import jax

from jddp.config.versions import source_hash
from jddp.distributed.coordination import from_first
from jddp.engine.planned import PARTS, Form, Program
from jddp.engine.state import is_float
from jddp.ground.errors import ConfigError, FileSystemError
from jddp.ground.typing import JsonObject, Settings
from jddp.trainer.loop import Loop
from jddp.trainer.reports.run_directory import RunDirectory, changed_keys, compare_keys, is_free
from jddp.trainer.run import Progress, Run
from jddp.trainer.saving import BEST
from jddp.trainer.watching import judge_again

SECONDS = 600.0  # Limit for process 0 to read the file of records.
# Packages whose versions may trace the same code to different equations.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jddp")
Trace = Callable[[Form | None], Program]


def resume(loop: Loop) -> None:
    """Restores the newest checkpoint, if there is one, and drops the records of later steps."""
    run, files = loop.run, loop.files
    if files is None:
        _count_steps(loop)
        return
    run.progress.to_json()  # A position that cannot be saved is refused now.
    restored = loop.saving.restore(run.state)
    trace = functools.partial(loop.ddp.steps.program, run.state, loop.source.peek())
    run.progress = replace(run.progress, program=_program(trace, run.progress.manifest))
    if restored is None:
        _count_steps(loop)
        _resume_records(run, files)
        return
    run.state = restored.state
    try:
        before = Progress.from_json(restored.step, restored.beside)
        _continue(loop, before, trace)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FileSystemError(
            f"{run.run_dir} holds, at step {restored.step}, a run.json that this version of jddp "
            f"cannot read: {error!r}. Choose another run.dir."
        ) from error
    recorded = _resume_records(run, files)
    # Records may have been lost; and the checkpoint came before the evaluation of its step.
    last = recorded[-1]["step"] if recorded else -1
    evaluations = recorded + [x for x in run.evaluations if x["step"] > last]
    run.progress = replace(run.progress, evaluations=evaluations)
    # A checkpoint knows the earlier best ones; the best one of its own step may have come later.
    best = {*run.checkpoints, *(f"{BEST}/{x}" for x in before.best)}
    run.lost = {x["step"] for x in evaluations if f"{BEST}/{x['step']}" not in best}
    loop.notes.insert(0, f"resumed from step {run.step} of {loop.num_steps}")
    if judge_again(run, loop.options.callbacks):
        loop.notes.append("early stopping has changed: the run it had stopped continues")


def _continue(loop: Loop, before: Progress, trace: Trace) -> None:
    """Continues from the progress of a checkpoint, and notes the differences."""
    run, source, now, steps = loop.run, loop.source, loop.run.progress, loop.ddp.steps
    in_another_world = None
    if before.world != now.world:
        in_another_world = differences(
            before.world,
            now.world,
            uses_rng=steps.planned(source.peek()).uses_rng,
            has_statistics=any(map(is_float, jax.tree.leaves(run.state.model_state))),
        )
    run.progress = replace(
        before,
        evaluations=[x for x in before.evaluations if x["step"] <= before.step],
        **{name: getattr(now, name) for name in ("world", "program", "config", "manifest")},
    )
    source.move_to(before.position)
    _count_steps(loop)
    run.progress = now = replace(run.progress, plan=loop.options.settings)
    another, kept = _compare_programs(before, now, loop.options.resume, trace)
    run.progress = replace(now, program=kept)
    notes = [
        another,
        changed_settings(before, now),
        in_another_world,
    ]
    loop.notes += filter(None, notes)


def _count_steps(loop: Loop) -> None:
    """Counts the steps of some epochs, which end with their last example."""
    if loop.options.num_epochs is not None:
        num_steps = loop.run.step + loop.source.num_left
        loop.options = replace(loop.options, num_steps=num_steps)
        loop.reporter.course.num_steps = num_steps


def _resume_records(run: Run, files: RunDirectory) -> list[JsonObject]:
    """Drops records of later steps; returns the remaining evaluations, the same on all processes.

    Only process 0 reads the file.

    Raises:
      FileSystemError: If it cannot be read or written.
    """
    step, read = run.step, files.metrics.read
    kept = json.dumps(files.metrics.resume_at(step))
    size, evaluations = json.loads(from_first("records", kept, timeout_seconds=SECONDS))
    run.read_earlier = lambda: [record for record in read(size) if record["step"] <= step]
    return list(evaluations)


def _program(trace: Trace, manifest: JsonObject) -> JsonObject:
    """The program of a run, as a checkpoint keeps it."""
    program = trace(None)
    made_by = {name: manifest["versions"][name] for name in PACKAGES}
    made_by |= {"code of jddp": source_hash(), "platform": jax.default_backend()}
    found = {"digests": dict(program.digests), "form": dataclasses.asdict(program.form)}
    return {**found, "made_by": made_by, "changes": []}


def _compare_programs(
    before: Progress, now: Progress, resume: str, trace: Trace
) -> tuple[str | None, JsonObject | None]:
    """Compares the program with the program of a checkpoint, which may keep none.

    Returns:
      A note on the difference, or None; and the program to keep, with all changes.

    Raises:
      ConfigError: If a part differs that may not.
    """
    kept, old = now.program, before.program
    if kept is None or old is None:
        return None, kept
    kept = {**kept, "changes": old["changes"]}
    digests = kept["digests"]
    if old["form"] != kept["form"]:  # Programs are compared in the same form.
        try:
            digests = trace(Form(**old["form"])).digests
        except Exception:  # The loss does not accept rows of that form.
            digests = dict.fromkeys(PARTS)
    if not (differ := [part for part in PARTS if old["digests"][part] != digests[part]]):
        return None, kept
    made_by = kept["made_by"]
    others = [f"{k} {x} -> {made_by[k]}" for k, x in old["made_by"].items() if x != made_by[k]]
    refused = [part for part in differ if part not in _allowed(before, now)]
    if refused and not others and resume != "changed":
        raise ConfigError(
            f"The program differs from the program of step {before.step} of this run: another "
            f"{' and '.join(refused)}, in equations or constants. Undo the change, or choose "
            "another run.dir; or continue this run with the new program: resume='changed' "
            "(checkpoint.resume=changed of a config)."
        )
    change = {"step": before.step, "parts": differ, "digests": old["digests"]}
    kept["changes"] = [*old["changes"], {**change, "made_by": old["made_by"]}]
    if not refused:
        return None, kept  # The keys that allow it are reported.
    why = "as resume=changed allows"
    if others:
        why = f"as another version may make them ({', '.join(others)})"
    verb = "differs" if len(differ) == 1 else "differ"
    found = f"another program: {' and '.join(differ)} {verb} in equations or constants, {why}"
    return found, kept


def _allowed(before: Progress, now: Progress) -> set[str]:
    """Parts that follow from keys of the config which differ, and may."""
    if before.config is None or now.config is None:
        return set()
    allowed = set[str]()
    # A schedule without its own length has the length of the run.
    if before.plan["num_steps"] != now.plan["num_steps"]:
        allowed.add("optimizer")
    for key in changed_keys(before.config, now.config):
        section = key.partition(".")[0]
        allowed |= {section} if section in PARTS else set(PARTS)
    return allowed


def differences(
    before: Settings,
    now: Settings,
    *,
    uses_rng: bool,
    has_statistics: bool,
) -> str | None:
    """A note on the difference of two topologies and its effect; None if they are equal.

    Args:
      before: Number of processes, of devices and of micro-batches, and the mode of batch norm, by
        name, when the run was saved.
      now: Topology of the run that resumes.
      uses_rng: Whether a step uses random numbers.
      has_statistics: Whether the model keeps batch statistics.
    """
    differ = [name for name in now if before.get(name) != now[name]]
    if not differ:
        return None
    numbers = ", ".join(f"{name} {now[name]} (was {before.get(name)})" for name in differ)
    exact = f"{numbers}: the order of examples and all counts continue exactly"
    options = [name for name in differ if name not in ("num_processes", "num_devices")]
    if now["logical_replicas"] is not None and not options:
        return f"{exact}; all numbers stay bitwise identical"
    others = [name for name in options if not is_free(f"ddp.{name}", before, now)]
    inexact = [f"another {name} changes what later steps compute" for name in others]
    if uses_rng and differ != ["num_processes"]:
        inexact.append("random numbers differ (keys depend on replica and micro-batch)")
    is_whole = now["batch_norm"] == "sync" and now["batch_norm_group_size"] is None
    split_otherwise = "accumulate_steps" in differ or not is_whole
    if has_statistics and split_otherwise and differ != ["num_processes"]:
        inexact.append("batch norm computes statistics over other parts of a batch")
    if now.get("local_steps") and "num_devices" in differ:
        inexact.append("each replica starts from the mean of the saved replicas")
    return f"{exact}; {'; '.join(inexact) or 'all else is equal within rounding'}"


def changed_settings(before: Progress, now: Progress) -> str | None:
    """A note on the settings that have changed since the run was saved, or None."""
    if now.config is not None and before.config is not None:
        differ = compare_keys(before.config, now.config)[1]
    else:
        old = before.plan
        differ = [f"{k} {old[k]} -> {x}" for k, x in now.plan.items() if old.get(k, x) != x]
    return f"changed: {', '.join(differ)}; finished steps stay" if differ else None
