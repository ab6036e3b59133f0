"""The first and the last lines of `jddp train`: what the job is, and what to do with its run.

    show(opening(job, "my.yaml", "", columns=80))
    show(closing(job, run, columns=80))

Only shapes are traced, which training uses again.
"""

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jddp.config.schema import Config
from jddp.config.versions import versions
from jddp.data.source import DataSet, Streams
from jddp.job.job import Job
from jddp.job.length import period_of
from jddp.names.plugins import OPTIONS, find
from jddp.runs.results import METRICS
from jddp.trainer.options import as_period
from jddp.trainer.reports.lines import Pause, unbroken, wrap
from jddp.trainer.run import Run
from jddp.trainer.watching import Watching

MOST_MODULES = 6
PAGE = "report.html"  # of `jddp.workbench`


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
    is_named = device.device_kind != device.platform
    facts = {
        "config": name,
        "data": job.data.description if job.data else f"not here: {job.data_error}",
        "model": _model(job),
        "devices": f"{mesh.size} x {device.device_kind}" if is_named else "",
        "batch": _batch(job),
        "steps": _steps(job),
        "eval": _evaluations(job),
        "lr": _rates(job),
        "sends": job.ddp.steps.planned(job.batch_spec).plan.headline if mesh.size > 1 else "",
        "run dir": str(config.run.dir),
        "": _files(job),
        "job": detected,
    }
    return "\n".join([*wrap(head, columns), *_labelled(facts, columns)])


def closing(job: Job, run: Run, *, columns: int) -> str:
    """A few lines on a run that has ended: its best step, its time, its page, and commands.

    Args:
      job: The job.
      run: The run of the job.
      columns: Width of the terminal.
    """
    facts = {
        "done": ", ".join(unbroken(part) for part in [*_times(run), _best(job, run)] if part),
        "page": _page(job, run),
        "next": "  ".join(map(unbroken, _commands(job.config))),
    }
    return "\n".join(_labelled(facts, columns))


def _page(job: Job, run: Run) -> str:
    """The path of the page of a run, if it has been written."""
    is_there = run.run_dir is not None and (run.run_dir / PAGE).exists()
    return f"{job.config.run.dir}/{PAGE}" if is_there else ""


def _commands(config: Config) -> list[str]:
    """Commands to continue with."""
    run = shlex.quote(str(config.run.dir))
    given = "--prompt TEXT" if config.loss.name == "next_token" else "--data FILE --out FILE"
    return [f"jddp evaluate {run}", f"jddp predict {run} {given}", f"jddp compare {run} OTHER"]


def _labelled(facts: dict[str, str], columns: int) -> Iterator[str]:
    for label, fact in facts.items():
        if fact:
            yield from wrap(unbroken(f"{label:<9}") + fact, columns, indent=" " * 9)


def _model(job: Job) -> str:
    """The model with the parameters of its modules, such as "cnn, 52 parameters = a 40 + b 12"."""
    model = job.config.model
    sizes = {path: math.prod(shape) for path, shape in job.parameter_shapes.items()}
    modules = Counter[str]()
    for path, size in sizes.items():
        modules[path.partition("/")[0]] += size
    parts = [unbroken(f"{name} {size:,}") for name, size in folded(modules).items()]
    parts = [f"= {' + '.join(parts)}"] if len(modules) > 1 else []
    return " ".join([f"{model.name or model.target}, {sum(sizes.values()):,} parameters", *parts])


def folded(modules: dict[str, int]) -> dict[str, int]:
    """A few names with their sizes: if there are many, those that differ in a number are one.

    Args:
      modules: Sizes of modules by name.
    """
    if len(modules) <= MOST_MODULES:
        return modules
    stems = {name: re.sub(r"\d+", "", name) for name in modules}
    counts, sums = Counter(stems.values()), Counter[str]()
    for name, size in modules.items():
        stem = stems[name]
        sums[f"{counts[stem]} x {stem.strip('_')}" if counts[stem] > 1 else name] += size
    rest = sums.most_common()[MOST_MODULES - 1 :]
    if len(rest) > 1:
        for name, _ in rest:
            del sums[name]
        sums[f"{len(rest)} others"] = sum(size for _, size in rest)
    return sums


def _batch(job: Job) -> str:
    """The factors of the global batch size, such as "128 = 8 devices x 16 examples"."""
    mesh, num_parts = job.ddp.mesh, job.config.ddp.accumulate_steps
    size, num = job.config.data.global_batch_size, jax.process_count()
    rows = num * jax.tree.leaves(job.batch_spec)[0].shape[0]
    factors = [
        f"{num} processes" if num > 1 else "",
        _count(mesh.size // num, "device"),
        f"{num_parts} micro-batches" if num_parts > 1 else "",
        _count(rows // mesh.size // num_parts, "example"),
    ]
    padding = f" and {rows - size} of padding" if rows > size else ""
    return f"{size}{padding} = {' x '.join(filter(None, factors))}"


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _steps(job: Job) -> str:
    num_steps, size = job.num_steps, job.config.data.global_batch_size
    if job.data is None or num_steps is None:
        return f"{num_steps or 'unknown'}: the data is not on this machine"
    if isinstance(job.data, Streams):
        return f"{num_steps:,} of a stream"
    epochs = num_steps * size / len(job.data.train)
    return f"{num_steps:,} = {epochs:.4g} epochs of {len(job.data.train):,} examples"


def _steps_per_epoch(job: Job) -> float | None:
    """Steps of an epoch; None if the data are absent, or have no epochs."""
    data, size = job.data, job.config.data.global_batch_size
    return len(data.train) / size if isinstance(data, DataSet) else None


def _evaluations(job: Job) -> str:
    """The period of the evaluations, and how many there are in all."""
    every = as_period(period_of(job.config.train, "eval_"))
    if every is None:
        return ""
    if job.num_steps is None:
        return f"every {every}"
    num = Pause.at_ends_of(every, _steps_per_epoch(job)).num_left(1, job.num_steps)
    return f"every {every}, {num} in all" if num > 1 else "at the end"


def _rates(job: Job) -> str:
    """The learning rate at the first step, after each quarter but the third, and at the end."""
    schedule, num_steps = job.learning_rate, job.num_steps
    if schedule is None or num_steps is None:
        return ""
    steps = dict.fromkeys(max(1, round(share * num_steps)) for share in (0, 0.25, 0.5, 1))
    rates = {step: f"{float(np.asarray(schedule(step - 1))):.2g}" for step in steps}
    if len(set(rates.values())) == 1:
        return f"{rates[1]} at all steps"
    others = [unbroken(f"{rate} at {step:,}") for step, rate in rates.items() if step > 1]
    return ", ".join([unbroken(f"{rates[1]} at step 1"), *others])


def _files(job: Job) -> str:
    """The files of the run directory, and when they are written."""
    every = as_period(period_of(job.config.checkpoint))
    when = "at the end" if every is None else f"every {every}"
    return f"metrics.jsonl, logs, {PAGE}, checkpoints {when}"


def _times(run: Run) -> Iterator[str]:
    """The steps and the seconds of all starts, and the goodput, as the page of the run has them."""
    yield f"{run.step:,} steps"
    read_facts = find(OPTIONS, "facts")
    if run.run_dir is not None and read_facts is not None:
        facts = read_facts(run.run_dir, is_over=True)
        yield f"{facts.history.seconds:.0f} s in all"
        yield "" if facts.goodput is None else f"goodput {100 * facts.goodput:.0f} %"


def _best(job: Job, run: Run) -> str:
    """The best evaluation by the metric that the config names, or by a common one."""
    chosen = job.config.checkpoint.best_metric
    names: Iterable[str] = [chosen] if chosen else METRICS
    found = (name for name in names if isinstance(run.eval_metrics.get(name), float))
    metric = next(found, None)
    return "" if metric is None else Watching(metric, "auto").best_so_far(run)
