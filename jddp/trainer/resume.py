"""The beginning of a run that resumes: its newest checkpoint, and notes on changes since then.

The effect of a key, in `config.schema`, decides whether it may differ at all. `run.json` keeps
digests of the program, too, and a run that resumes compares its own. If a config allows a change
(`train.num_steps`, `checkpoint.allow_changed`), the parts that its keys describe may differ.
Another version of a package may trace the same code to different equations. Any other difference
is refused, unless `resume="changed"` continues with the new program.
"""

import json
from dataclasses import replace

import jax

from jddp.config.versions import source_hash
from jddp.distributed.coordination import from_first
from jddp.engine.planned import PARTS
from jddp.ground.errors import ConfigError, FileSystemError
from jddp.ground.typing import JsonObject
from jddp.trainer.loop import Loop
from jddp.trainer.reports.run_directory import RunDirectory, changed_keys, compare_keys
from jddp.trainer.run import Progress, Run
from jddp.trainer.saving import BEST
from jddp.trainer.watching import judge_again

SECONDS = 600.0  # Limit for process 0 to read the file of records.
# Packages whose versions may trace the same code to different equations.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jddp")


def resume(loop: Loop) -> None:
    """Restores the newest checkpoint, if there is one, and drops the records of later steps."""
    run, files = loop.run, loop.files
    if files is None:
        run.state = loop.first()
        _count_steps(loop)
        return
    run.progress.to_json()  # A position that cannot be saved is refused now.
    restored = loop.saving.restore(run.state, loop.first)
    run.progress = replace(run.progress, program=_program(loop))
    if restored is None:
        run.state = loop.first()
        _count_steps(loop)
        _resume_records(run, files)
        return
    run.state = restored.state
    try:
        before = Progress.from_json(restored.step, restored.beside)
        _continue(loop, before)
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


def _continue(loop: Loop, before: Progress) -> None:
    """Continues from the progress of a checkpoint, and notes the differences."""
    run, source, now = loop.run, loop.source, loop.run.progress
    run.progress = replace(
        before,
        evaluations=[x for x in before.evaluations if x["step"] <= before.step],
        **{name: getattr(now, name) for name in ("world", "program", "config", "manifest")},
    )
    source.move_to(before.position)
    _count_steps(loop)
    run.progress = now = replace(run.progress, plan=loop.options.settings)
    notes = [_compare_programs(before, now, loop.options.resume), changes(before, now)]
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


def _program(loop: Loop) -> JsonObject:
    """The program of a run, as a checkpoint keeps it."""
    program = loop.ddp.steps.program(loop.run.state, loop.source.peek())
    versions = loop.run.progress.manifest["versions"]
    made_by = {name: versions[name] for name in PACKAGES}
    made_by |= {"code of jddp": source_hash(), "platform": jax.default_backend()}
    return {**program._asdict(), "made_by": made_by}


def _compare_programs(before: Progress, now: Progress, resume: str) -> str | None:
    """Compares the program with the program of a checkpoint, which may keep none.

    Returns:
      A note on the difference, or None.

    Raises:
      ConfigError: If a part differs that may not.
    """
    program, old = now.program, before.program
    if program is None or old is None:
        return None
    # Equations of model and loss depend on the shapes of a micro-batch and on the replicas.
    parts = PARTS if old["form"] == program["form"] else ("optimizer",)
    allowed = _allowed(before, now)  # The keys that allow it are reported.
    differ = [
        part
        for part in parts
        if part not in allowed and old["digests"][part] != program["digests"][part]
    ]
    if not differ:
        return None
    made_by = program["made_by"]
    others = [f"{k} {x} -> {made_by[k]}" for k, x in old["made_by"].items() if x != made_by[k]]
    if not others and resume != "changed":
        raise ConfigError(
            f"The program differs from the program of step {before.step} of this run: another "
            f"{' and '.join(differ)}, in equations or constants. Undo the change, or choose "
            "another run.dir; or continue this run with the new program: resume='changed' "
            "(checkpoint.resume=changed of a config)."
        )
    why = "as resume=changed allows"
    if others:
        why = f"as another version may make them ({', '.join(others)})"
    verb = "differs" if len(differ) == 1 else "differ"
    return f"another program: {' and '.join(differ)} {verb} in equations or constants, {why}"


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


def changes(before: Progress, now: Progress) -> str | None:
    """A note on settings, devices and processes that have changed since the run was saved, if any.

    The topology has the modes of a step, such as its micro-batches, too.
    """
    old, new, differ = before.world, now.world, list[str]()
    if before.config is None or now.config is None:
        old, new = {**before.plan, **old}, {**now.plan, **new}
    else:
        differ = compare_keys(before.config, now.config)[1]
    differ += [f"{k} {old[k]} -> {x}" for k, x in new.items() if old.get(k, x) != x]
    exact = "finished steps stay; the order of examples and all counts continue exactly"
    return f"changed: {', '.join(differ)}: {exact}" if differ else None
