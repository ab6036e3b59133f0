"""Looks at each step: skipped steps, loss spikes, and whether all replicas are equal.

After too many skipped steps in a row the run ends. Diagnostics are written to the run directory. If
such steps are skipped, state and norms are from before them; if they are not, the state is not
finite, and the norms show where.

    nonfinite/step_120/report.json      loss, examples, position, key, norms of each layer

A spike is a loss far above the losses before it, by a rule that a few outliers do not move.

    spike:  loss > median + 20 * max(MAD, 0.5 % of the median), of the last 100 finite losses

The MAD, the median absolute deviation, is 0.67 standard deviations of Gaussian noise, so 20 MADs
are 13.5 of these. False alarms in a million steps: none for Gaussian noise, 3 for Laplace noise, 20
for Student's t with 5 degrees of freedom, 400 with 3 (measured; `tests/trainer`). A falling
loss raises no alarm. A loss that rises for good is a spike until it is nearly half of the window.

The loss of a step is global, so all processes find the same spikes. It is judged by losses up to
two steps before: these are known when a step is sent, and a step may be left out while it runs.
"""

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from jddp.distributed.coordination import gather
from jddp.engine.compiled import Trainable
from jddp.engine.digest import digests, find_divergence
from jddp.engine.evaluation import own_rows
from jddp.engine.guard import LEAST
from jddp.engine.mesh import mesh_of
from jddp.engine.replay import ReplayedStep
from jddp.engine.state import TrainState, by_path
from jddp.ground.errors import NumericsError, ReplicaMismatchError, words_of
from jddp.ground.files import SameFolder, make_folder, replace_file
from jddp.ground.names import few
from jddp.ground.typing import Batch, JsonObject, Metrics
from jddp.inspection.layers import Layers, diagnose, num_outputs
from jddp.trainer.prefetch import Source
from jddp.trainer.run import Checks, Losses, Progress, Skips

WINDOW = 100  # Number of finite losses with which a loss is compared.
LEAST_LOSSES = 50  # With fewer losses nothing is a spike: a run begins with few.
NUM_MADS = 20.0  # Distance from the median above which a loss is a spike.
LEAST_MAD = 0.005  # Fraction of the median: the MAD of a constant loss is 0.
LAG = 2  # Steps from the newest loss behind a limit to the step that the limit judges.

WAY_OUT = "Lower the learning rate, clip with max_grad_norm, or look at the data"
NOT_FINITE = "loss, gradients or other state are not finite"
LABELS = ("label", "labels", "target", "targets", "y", "tokens")
SECONDS = 600.0  # Limit for other processes to check their rows.
log = logging.getLogger("jddp")


def level(losses: Sequence[float]) -> tuple[float, float]:
    """The median of losses, and their MAD, which is at least a fraction of the median."""
    median = statistics.median(losses)
    mad = statistics.median(abs(x - median) for x in losses)
    return median, max(mad, LEAST_MAD * abs(median))


def limit_after(losses: Sequence[float]) -> float:
    """The largest loss after these that is no spike, a number of float32; or infinity."""
    if len(losses) < LEAST_LOSSES:
        return math.inf
    median, mad = level(losses)
    # Rounded to float32, as the loss on the devices is: both compare the same numbers.
    return float(np.float32(median + NUM_MADS * mad)) if mad > 0 else math.inf


def window_at(losses: Losses, step: int) -> list[float]:
    """The losses with which the loss of a step is compared."""
    return [loss for number, loss in losses if number <= step - LAG][-WINDOW:]


class Spike(NamedTuple):
    """A loss far above the losses before it.

    Attributes:
      step: Number of the step, from 1.
      loss: Loss of the step.
      median: Median of the losses before.
      num_mads: Distance of the loss from the median, in MADs.
      is_first: Whether the step before was none.
    """

    step: int
    loss: float
    median: float
    num_mads: float
    is_first: bool


def find_spike(losses: Losses, step: int, loss: float) -> Spike | None:
    """Returns the spike that the loss of a step is, judged by the losses before; or None."""
    window = window_at(losses, step)
    if loss <= limit_after(window):
        return None
    last_step, last = losses[-1]
    is_first = last_step != step - 1 or last <= limit_after(window_at(losses, last_step))
    median, mad = level(window)
    return Spike(step, loss, median, (loss - median) / mad, is_first)


class ReplicaCheck:
    """A comparison of all replicas of a state: started on the devices, read one step later.

    Args:
      every: Steps between comparisons; None never compares.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._begun: tuple[int, jax.Array, dict[str, jax.Array]] | None = None

    def begin(self, step: int, state: TrainState) -> None:
        """Digests a state after `step` finished steps, if due; asynchronous."""
        if self._every and step % self._every == 0 and mesh_of(state.step).size > 1:
            arrays = by_path(state)  # As a save has them: the same program digests both.
            self._begun = step, digests(arrays), arrays

    def finish(self) -> None:
        """Waits for the comparison that was started, if any.

        Raises:
          ReplicaMismatchError: If replicas differ.
        """
        if self._begun is None:
            return
        (step, found, arrays), self._begun = self._begun, None
        if (difference := find_divergence(found, arrays)) is not None:
            raise ReplicaMismatchError(
                f"After step {step} {difference}. This state is not saved: existing checkpoints "
                "are from identical replicas. Exclude that device, or look for code whose result "
                "depends on the host."
            )


class Sent(NamedTuple):
    """A step that was sent to the devices.

    Attributes:
      step: Number of the step, from 1.
      metrics: Metrics of the step, perhaps not yet computed.
      batch: Rows of the step, on the devices.
      position: Position in the data after the step.
    """

    step: int
    metrics: Metrics
    batch: Batch
    position: JsonObject


@dataclass(frozen=True, eq=False)
class Numerics:
    """The check of every step for NaN, infinity and spikes.

    Attributes:
      ddp: A `jddp.DataParallel`, which takes the steps.
      source: The training batches.
      run_dir: Folder of the run, for the diagnostics; None keeps none.
      checks: Action at a spike, and the number of skipped steps that ends the run.
    """

    ddp: Trainable
    source: Source
    run_dir: SameFolder | None
    checks: Checks

    def options(self, progress: Progress) -> JsonObject:
        """Options of the next step: to replay it, and to leave out its update if it is a spike."""
        number, every = progress.step + 1, self.checks.replay_every_steps
        options: JsonObject = {}
        if every and number % every == 0:
            options["make"] = ReplayedStep
        if self.checks.on_spike == "skip":
            options["loss_limit"] = limit_after(window_at(progress.losses, number))
        return options

    def look(
        self, progress: Progress, sent: Sent, state: TrainState
    ) -> tuple[Progress, str, dict[str, float]]:
        """Waits for a step.

        Args:
          progress: The progress, with the losses and the skipped steps before.
          sent: The step.
          state: The newest state, after this step or the next one.

        Returns:
          The progress with its loss; a sentence to print, or ""; and fields for its record:
          "spike", in MADs, if its loss is one.

        Raises:
          NumericsError: If too many were skipped, or the loss is not finite and is not skipped.
        """
        metrics = {"skipped": 0, "loss_scale": LEAST, **sent.metrics}
        values = [metrics[name] for name in ("loss", "skipped", "loss_scale")]
        loss, num_skipped, scale = map(float, jax.device_get(values))
        losses, spike = progress.losses, None
        if self.checks.on_spike is not None and math.isfinite(loss):
            spike = find_spike(losses, sent.step, loss)
            losses = (*losses, (sent.step, loss))[-WINDOW - LAG :]
        before = progress.skipped
        was_skipped = num_skipped > before.total
        left_out = spike if self.checks.on_spike == "skip" else None
        # A step that only lowers the loss scale has a finite forward pass. A step that is skipped
        # because of other state leaves the loss scale as it was.
        is_good = math.isfinite(loss) and left_out is None
        is_scaled = was_skipped and is_good and scale > LEAST and scale != before.loss_scale
        in_a_row = before.in_a_row + (not is_scaled) if was_skipped else 0
        is_over = in_a_row >= self.checks.max_consecutive_skips
        if not is_scaled and (is_over or not (was_skipped or math.isfinite(loss))):
            why = NOT_FINITE
            if left_out is not None:
                why = f"loss is far above the losses before, {left_out.median:.4g} in the median"
            raise NumericsError(self._describe(sent, state, loss, why, in_a_row))
        skipped = Skips(int(num_skipped), in_a_row, scale if was_skipped else None)
        progress = replace(progress, losses=losses, skipped=skipped)
        if spike is not None:
            note = (
                f"step {spike.step}: the loss jumps to {spike.loss:.4g}, {spike.num_mads:.0f} MADs "
                f"above the median of the losses before, {spike.median:.4g}"
            )
            note += "" if left_out is None else "; its update is left out"
            return progress, note if spike.is_first else "", {"spike": spike.num_mads}
        is_first = in_a_row == 1 and not is_scaled
        return progress, f"step {sent.step} is skipped: its {NOT_FINITE}" if is_first else "", {}

    def _describe(self, sent: Sent, state: TrainState, loss: float, why: str, in_a_row: int) -> str:
        found = f"The loss is {loss} at step {sent.step}"
        if in_a_row:
            found += f", the last of {in_a_row} in a row that were skipped: the {why}"
        kept = "" if self.run_dir is None else self._keep(self.run_dir, sent, state, loss, in_a_row)
        way_out = self._labels_beyond(sent.batch) or WAY_OUT
        return f"{found}.{kept} {way_out}; the last checkpoint is from before."

    def _labels_beyond(self, batch: Batch) -> str:
        """A sentence about labels or tokens for which the model has no output, or ""."""
        outputs = num_outputs(self.ddp, batch) or 1
        columns = batch if isinstance(batch, Mapping) else {}
        for name in LABELS if outputs > 1 else ():
            x: np.ndarray = columns.get(name, np.zeros(1))
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
        # The number of the step gives the norms the same random numbers.
        first = state.replace(step=state.step - (int(state.step) - sent.step + 1))
        layers: Layers = {}
        try:
            layers = diagnose(self.ddp, first, sent.batch)
        except jax.errors.JaxRuntimeError as error:  # It must not hide the first error.
            log.warning("The norms of the layers cannot be computed: %s", error)
        examples = self.source.examples_before(sent.position)
        broken = _broken_rows(rows)
        if examples is not None:  # Padded rows have no example.
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
        try:
            run_dir.check()
            if jax.process_index() == 0:
                make_folder(folder)
                given = json.dumps(report, default=str)  # the state of an iterator may be anything
                # Numbers that are not finite become text, because JSON has none.
                worded = json.loads(given, parse_constant=lambda x: str(float(x)))
                text = json.dumps(worded, indent=2, allow_nan=False)
                replace_file(folder / "report.json", f"{text}\n".encode())
        except OSError as error:
            log.error("%s: cannot be written: %s.", folder, words_of(error))
        wrong = [name for name, layer in layers.items() if layer["not_finite"]]
        kind = "rows" if examples is None else "examples"
        found = [f"inputs of {kind} {few(broken)}"] if broken else []
        if wrong and in_a_row:  # Without skips the whole state is not finite.
            found.append(f"gradients of {few(wrong)}")
        not_finite = f" Not finite: {'; '.join(found)}." if found else ""
        return f" {folder} has its norms.{not_finite}"


def _broken_rows(rows: Mapping[str, np.ndarray]) -> list[int]:
    """Rows of the global batch with numbers that are not finite, found by all processes."""
    floats = [x.astype(np.float32) for x in rows.values() if x.dtype.kind in "fV"]
    num_rows = len(next(iter(rows.values())))
    broken = [i for i in range(num_rows) if not all(np.isfinite(x[i]).all() for x in floats)]
    all_broken = gather("nonfinite", json.dumps(broken), timeout_seconds=SECONDS)
    return [p * num_rows + i for p, found in enumerate(all_broken) for i in json.loads(found)]
