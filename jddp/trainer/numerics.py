"""Looks at the loss of each step: counts skipped ones, and ends the run after too many in a row.

Diagnostics are written to the run directory. If such steps are skipped, state and norms are from
before them; otherwise the state is not finite, and the norms show where.

    nonfinite/step_120/report.json      loss, examples, position, key, norms of each layer
    nonfinite/step_120/process_0.npz    the rows that process 0 gave to the step
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jddp.distributed.coordination import gather
from jddp.engine.evaluation import own_rows
from jddp.engine.guard import LEAST
from jddp.engine.state import TrainState, by_path
from jddp.engine.trainable import Trainable
from jddp.errors import NumericsError, words_of
from jddp.files import SameFolder, make_folder, opener, replace_file
from jddp.inspection.norms import Layers, diagnose
from jddp.inspection.outputs import num_outputs
from jddp.names import few
from jddp.trainer.prefetch import Source
from jddp.trainer.progress import Progress, Skips
from jddp.trainer.spikes import Spikes
from jddp.typing import Batch, JsonObject, Leaf, Metrics, Settings

WAY_OUT = "Lower the learning rate, clip with max_grad_norm, or look at the data"
NOT_FINITE = "loss, gradients or other state are not finite"
LABELS = ("label", "labels", "target", "targets", "y", "tokens")
SECONDS = 600.0  # for other processes to check their rows
log = logging.getLogger("jddp")


class Sent(NamedTuple):
    """A step that was sent to the devices.

    Attributes:
      step: Number of the step, from 1.
      metrics: Metrics of the step, perhaps not yet computed.
      batch: Rows of the step, on the devices.
      position: Position in the data after the step.
      updates: Updates so far of an optimizer that leaves out steps by itself; None of another.
    """

    step: int
    metrics: Metrics
    batch: Batch
    position: JsonObject
    updates: Leaf | None = None


class Seen(NamedTuple):
    """Findings about a step.

    Attributes:
      note: A sentence to print, or "".
      fields: Fields for its record: "spike", in MADs, if its loss is one.
    """

    note: str
    fields: dict[str, float]


class Numerics:
    """The check of every step for NaN, infinity and spikes.

    Args:
      ddp: A `jddp.DataParallel`, which takes the steps.
      source: The training batches.
      run_dir: Folder of the run, for the diagnostics; None keeps none.
      most: Number of skipped steps in a row that ends the run.
      spikes: The rule by which losses are spikes, and what is done about them.
    """

    def __init__(
        self,
        ddp: Trainable,
        source: Source,
        run_dir: SameFolder | None,
        most: int,
        spikes: Spikes,
    ) -> None:
        self._ddp = ddp
        self._source = source
        self._run_dir = run_dir
        self._most = most
        self._spikes = spikes

    def look(self, progress: Progress, sent: Sent, state: TrainState) -> tuple[Progress, Seen]:
        """Waits for a step, and returns the progress with its loss, and the findings about it.

        Args:
          progress: The progress, with the losses and the skipped steps before.
          sent: The step.
          state: The newest state, after this step or the next one.

        Raises:
          NumericsError: If too many were skipped, or the loss is not finite and is not skipped.
        """
        metrics = {"skipped": 0, "loss_scale": LEAST, **sent.metrics}
        values = [metrics[name] for name in ("loss", "skipped", "loss_scale")]
        loss, num_skipped, scale = map(float, jax.device_get(values))
        losses, spike = self._spikes.look(progress.losses, sent.step, loss)
        before = progress.skipped
        was_skipped = num_skipped > before.total
        # One that leaves out steps by itself shows the last update; its schedule begins with 0.
        own = None if sent.updates is None else max(int(sent.updates) - 1, 0)
        updates = sent.step - 1 - before.total if own is None else own
        left_out = spike if self._spikes.skips else None
        # The loss scale is coming down; the forward pass was finite. A step that is skipped because
        # of other state leaves the loss scale as it was.
        is_good = math.isfinite(loss) and left_out is None
        is_scaled = was_skipped and is_good and scale > LEAST and scale != before.loss_scale
        in_a_row = before.in_a_row + (not is_scaled) if was_skipped else 0
        if not is_scaled and (in_a_row >= self._most or not (was_skipped or math.isfinite(loss))):
            why = NOT_FINITE
            if left_out is not None:
                why = f"loss is far above the losses before, {left_out.median:.4g} in the median"
            raise NumericsError(self._describe(sent, state, loss, why, in_a_row))
        skipped = Skips(int(num_skipped), in_a_row, scale if was_skipped else None)
        progress = replace(progress, losses=losses, skipped=skipped, updates=updates)
        if spike is not None:
            return progress, Seen(self._spikes.note(spike), {"spike": spike.num_mads})
        is_first = in_a_row == 1 and not is_scaled
        note = f"step {sent.step} is skipped: its {NOT_FINITE}" if is_first else ""
        return progress, Seen(note, {})

    def _describe(self, sent: Sent, state: TrainState, loss: float, why: str, in_a_row: int) -> str:
        found = f"The loss is {loss} at step {sent.step}"
        if in_a_row:
            found += f", the last of {in_a_row} in a row that were skipped: the {why}"
        kept = (
            "" if self._run_dir is None else self._keep(self._run_dir, sent, state, loss, in_a_row)
        )
        way_out = self._labels_beyond(sent.batch) or WAY_OUT
        return f"{found}.{kept} {way_out}; the last checkpoint is from before."

    def _labels_beyond(self, batch: Batch) -> str:
        """A sentence about labels or tokens for which the model has no output, or ""."""
        outputs = num_outputs(self._ddp, batch) or 1
        for name in LABELS if outputs > 1 and isinstance(batch, Mapping) else ():
            x = batch.get(name, np.zeros(1))
            lowest, highest = x.min(), x.max()
            if x.dtype.kind in "iu" and not 0 <= lowest <= highest < outputs:
                return (
                    f"{name!r} is {lowest} to {highest} there; the model has {outputs} outputs, "
                    f"for 0 to {outputs - 1}: raise num_classes or vocab_size, or fix the data"
                )
        return ""

    def _keep(
        self, run_dir: SameFolder, sent: Sent, state: TrainState, loss: float, in_a_row: int
    ) -> str:
        """Writes the diagnostics of the step; returns sentences on their place and contents."""
        rows = {name: own_rows(x) for name, x in by_path(sent.batch).items()}
        layers = self._layers(sent, state)
        examples = self._source.examples_before(sent.position)
        broken = _broken_rows(rows)
        if examples is not None:  # without padding
            broken = [examples[row] for row in broken if row < len(examples)]
        report = {
            "step": sent.step,
            "loss": loss,
            "skipped_in_a_row": in_a_row,
            "metrics": {name: float(x) for name, x in jax.device_get(sent.metrics).items()},
            "examples": examples,
            "inputs_not_finite": broken,
            "position": sent.position,
            "key": np.asarray(jax.random.key_data(state.key)).tolist(),
            "layers_after_step": int(state.step),
            "layers": layers,
        }
        folder = run_dir.path / "nonfinite" / f"step_{sent.step}"
        write_evidence(folder, report, rows, run_dir)
        wrong = [name for name, layer in layers.items() if layer["not_finite"]]
        kind = "rows" if examples is None else "examples"
        found = [f"inputs of {kind} {few(broken)}"] if broken else []
        if wrong and in_a_row:  # else the state is not finite as a whole
            found.append(f"gradients of {few(wrong)}")
        not_finite = f" Not finite: {'; '.join(found)}." if found else ""
        return f" {folder} has its rows and norms.{not_finite}"

    def _layers(self, sent: Sent, state: TrainState) -> Layers:
        """Norms of the step, with the same random numbers, if its state is still there."""
        steps_ahead = int(state.step) - sent.step + 1
        before = state.replace(step=state.step - steps_ahead)
        try:
            return diagnose(self._ddp, before, sent.batch)
        except jax.errors.JaxRuntimeError as error:  # must not hide the first error
            log.warning("The norms of the layers cannot be computed: %s", error)
            return {}


def _broken_rows(rows: Mapping[str, np.ndarray]) -> list[int]:
    """Rows of the global batch with numbers that are not finite, found by all processes."""
    floats = [x.astype(np.float32) for x in rows.values() if x.dtype.kind in "fV"]
    num_rows = len(next(iter(rows.values())))
    broken = [i for i in range(num_rows) if not all(np.isfinite(x[i]).all() for x in floats)]
    all_broken = gather("nonfinite", json.dumps(broken), timeout_seconds=SECONDS)
    return [p * num_rows + i for p, found in enumerate(all_broken) for i in json.loads(found)]


def write_evidence(
    folder: Path, report: Settings, rows: Mapping[str, np.ndarray], run_dir: SameFolder
) -> None:
    """Writes this process's rows and, on process 0, the report; logs a failure.

    Numbers that are not finite become text, "nan" or "inf", because JSON has neither.
    """
    try:
        run_dir.check()
        make_folder(folder)
        # Others than numpy's dtypes, such as bfloat16, could not be read back.
        plain: Any = {k: x.astype("float32") if x.dtype.kind == "V" else x for k, x in rows.items()}
        rows_file = folder / f"process_{jax.process_index()}.npz"
        with open(rows_file, "wb", opener=opener) as file:
            np.savez(file, **plain)
        if jax.process_index() == 0:
            given = json.dumps(report, default=str)  # the state of an iterator may hold anything
            worded = json.loads(given, parse_constant=lambda x: str(float(x)))
            text = json.dumps(worded, indent=2, allow_nan=False)
            replace_file(folder / "report.json", f"{text}\n".encode())
    except OSError as error:
        log.error("%s: cannot be written: %s.", folder, words_of(error))
