"""The lines of `jddp train` about a job: first, in a dry run, and at the end of its run.

    show(opening(job, "my.yaml", "", columns=80))
    show(preview(job))                             # of a dry run
    show(closing(job, run, columns=80))

Only shapes are traced, which training uses again. A preview has sizes per device from the compiler,
and estimates the effect of a model's options from them.
"""

import dataclasses
import math
import shlex
import textwrap
from collections.abc import Iterator

import jax

from jddp.config.versions import versions
from jddp.data.source import Streams
from jddp.inspection.memory import NOTHING_FITS, Memory, ways_out
from jddp.inspection.memory import memory as memory_of
from jddp.trainer.job.build import Job
from jddp.trainer.job.parts import optimizer_table, period_of
from jddp.trainer.prefetch import NUM_AHEAD
from jddp.trainer.reports.lines import unbroken, wrap
from jddp.trainer.run import Run, as_period
from jddp.trainer.watching import Watching

METRICS = ("accuracy", "loss")  # Order of preference, if the config names none.
PAGE = "report.html"  # Written by `jddp.workbench`.


def opening(job: Job, name: str, detected: str, *, columns: int) -> str:
    """About ten lines on a job. To be called on all processes, since it may compile.

    Args:
      job: The job.
      name: Name of its config.
      detected: The launcher and the rank that were found, in words; "" for none.
      columns: Width of the terminal.
    """
    config, mesh = job.config, job.ddp.mesh
    num, device = jax.process_count(), mesh.devices.flat[0]
    processes = f"{num} process{'es' if num > 1 else ''}"
    devices = f"{mesh.size // num} {device.platform} devices"
    head = f"jddp {versions()['jddp']} | jax {jax.__version__} | {processes} x {devices}"
    every = period_of(config.checkpoint)
    when_saved = f"every {as_period(every)}" if as_period(every) else every or "at the end"
    is_named = device.device_kind != device.platform
    facts = {
        "config": name,
        "data": job.data.description if job.data else f"not here: {job.data_error}",
        "model": _model(job),
        "devices": f"{mesh.size} x {device.device_kind}" if is_named else "",
        "batch": _batch(job),
        "steps": _steps(job),
        "sends": job.ddp.steps.planned(job.batch_spec).plan.headline if mesh.size > 1 else "",
        "run dir": str(config.run.dir),
        "": f"metrics.jsonl, logs, {PAGE}, checkpoints {when_saved}",
        "job": detected,
    }
    return "\n".join([*wrap(head, columns), *_labelled(facts, columns)])


def closing(job: Job, run: Run, *, columns: int) -> str:
    """A few lines on a run that has ended: its best step, its page, and commands.

    Args:
      job: The job.
      run: The run of the job.
      columns: Width of the terminal.
    """
    config, run_dir = job.config, shlex.quote(str(job.config.run.dir))
    has_page = run.run_dir is not None and (run.run_dir / PAGE).exists()
    given = "--prompt TEXT" if config.loss.name == "next_token" else "--data FILE --out FILE"
    names = [config.checkpoint.best_metric] if config.checkpoint.best_metric else METRICS
    metrics = (name for name in names if isinstance(run.eval_metrics.get(name), float))
    best = [Watching(name, "auto").best_so_far(run) for name in metrics][:1]
    commands = [f"evaluate {run_dir}", f"predict {run_dir} {given}"]
    facts = {
        "done": ", ".join(map(unbroken, [f"{run.step:,} steps", *best])),
        "page": f"{config.run.dir}/{PAGE}" if has_page else "",
        "next": "\n".join(unbroken(f"jddp {command}") for command in commands),
    }
    return "\n".join(_labelled(facts, columns))


def _labelled(facts: dict[str, str], columns: int) -> Iterator[str]:
    for label, fact in facts.items():
        for line in fact.splitlines():
            yield from wrap(unbroken(f"{label:<9}") + line, columns, indent=" " * 9)
            label = ""


def _model(job: Job) -> str:
    model, steps = job.config.model, job.ddp.steps
    state = steps.abstract_state(job.batch_spec)
    layouts = jax.tree.leaves(steps.layouts(state).params)
    # Each replica may have parameters of its own: the parameters of one count.
    params = zip(layouts, jax.tree.leaves(state.params), strict=True)
    num = sum(math.prod(layout.one_device_shape(x.shape)) for layout, x in params)
    return f"{model.name or model.target}, {num:,} parameters"


def _batch(job: Job) -> str:
    """The factors of the global batch size, such as "128 = 8 devices x 16 examples"."""
    mesh, num_parts = job.ddp.mesh, job.config.ddp.accumulate_steps
    size, num = job.config.data.global_batch_size, jax.process_count()
    rows = num * jax.tree.leaves(job.batch_spec)[0].shape[0]
    factors = [
        f"{num} processes" if num > 1 else "",
        _counted(mesh.size // num, "device"),
        f"{num_parts} micro-batches" if num_parts > 1 else "",
        _counted(rows // mesh.size // num_parts, "example"),
    ]
    padding = f" and {rows - size} of padding" if rows > size else ""
    return f"{size}{padding} = {' x '.join(filter(None, factors))}"


def _counted(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _steps(job: Job) -> str:
    num_steps, size = job.num_steps, job.config.data.global_batch_size
    if job.data is None or num_steps is None:
        return f"{num_steps or 'unknown'}: the data is not on this machine"
    if isinstance(job.data, Streams):
        return f"{num_steps:,} of a stream"
    epochs = num_steps * size / len(job.data.train)
    return f"{num_steps:,} = {epochs:.4g} epochs of {len(job.data.train):,} examples"


def preview(job: Job) -> str:
    """Returns the bucket plan, groups of the optimizer, and memory."""
    memory = memory_of(job.ddp, job.batch_spec)
    optimizers = optimizer_table(job.config, job.ddp.steps.abstract_state(job.batch_spec))
    parts = [[str(job.ddp.steps.planned(job.batch_spec).plan)], optimizers]
    parts.append(memory_table(job, memory))
    return "\n\n".join(filter(None, map("\n".join, parts)))


def memory_table(job: Job, memory: Memory) -> list[str]:
    """Returns lines with the memory that a device needs and has."""
    memory = dataclasses.replace(memory, batch=(1 + NUM_AHEAD) * memory.batch)
    table = f"{memory!r}\nbatch: one batch for the step, and {NUM_AHEAD} prefetched batches"
    if memory.limit == math.inf:
        return [table, "the device does not report its memory: whether it fits is unknown"]
    if memory.fits:
        return [table, f"fits: {memory.peak / memory.limit:.1%} of the device"]
    ways = list(ways_out(job.ddp, job.batch_spec, memory)) or textwrap.wrap(NOTHING_FITS, 78)
    head = "does not fit; these settings would make it smaller"
    return [table, head, *(f"  {line}" for line in ways)]
