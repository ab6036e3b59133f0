"""The examples of a step of a run: their order is a function, so nothing needs to be recorded.

rows = rows_of_step("runs/one", 1200)
rows.examples                    # their numbers in the training data, in the order of the batch
"""

from dataclasses import dataclass
from pathlib import Path

from jddp.checkpoint.folders import finished
from jddp.checkpoint.reader import read_object
from jddp.checkpoint.storage import local_copy
from jddp.data.examples import Concatenated
from jddp.ground.errors import ConfigError, DataError, UsageError, check_choice, printable
from jddp.trainer.job.job import batches_in_order
from jddp.trainer.job.parts import find_source
from jddp.trainer.runs.saved import TRUST, config_in, is_trusted, kept_of_data, refusal


@dataclass(frozen=True)
class Rows:
    """The examples of a step, over all processes.

    Attributes:
      step: Number of the step, from 1.
      epoch: Passes over the data before its first example.
      examples: Number of each example in the training data, in the order of the global batch.
      names: Name of each example, where the data have names, such as files, or the folder and the
        number there, of a mixture; else empty.
    """

    step: int
    epoch: float
    examples: tuple[int, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        """A sentence, and a line for each example."""
        count = f"{len(self.examples):,} examples, from epoch {self.epoch:.3f} on"
        names = self.names or ("",) * len(self.examples)
        pairs = zip(self.examples, names, strict=True)
        lines = (
            f"{row:>6} {example:>12}  {printable(name)}".rstrip()
            for row, (example, name) in enumerate(pairs)
        )
        return "\n".join([f"step {self.step:,}: {count}", f"{'row':>6} {'example':>12}", *lines])


def rows_of_step(run_dir: str | Path, step: int, *, trust: str | None = None) -> Rows:
    """Finds the examples of a step from the config of a run and its data; nothing is trained.

    Positions are counted from the newest checkpoint, so a run that continues another one, or whose
    batch size has changed, is right from its last start on.

    Args:
      run_dir: A run directory, or its URL; the run may be training.
      step: Number of the step, from 1.
      trust: Code of the config that may be imported, as for `jddp.open_run`.

    Raises:
      UsageError: If there is no run, it has no config, or its data may not be imported.
      ConfigError: If there is no such step.
      DataError: If the data are absent, or have changed since the run began.
    """
    run_dir = local_copy(run_dir)
    config = config_in(run_dir)
    if config is None:
        raise UsageError(
            f"{run_dir} holds a run of jddp.fit, which saves no config: ask its batches, "
            "TrainBatches.examples_before."
        )
    check_choice("trust", trust, TRUST)
    if not is_trusted("data.target", config, trust, run_dir):
        raise refusal("data.target", config, "the data by data.name")
    data = find_source(config).load()
    digest = kept_of_data(run_dir).get("sha256")
    if digest and data.sha256 and data.sha256 != digest:
        raise DataError(
            f"The data have changed since the run began (sha256 {digest[:12]}, now "
            f"{data.sha256[:12]}), and with them the examples of its steps. Restore the data."
        )
    batches = batches_in_order(config, data, process_index=0, num_processes=1)
    saved, position = 0, 0
    if steps := finished(run_dir / "checkpoints"):
        saved = steps[-1]
        beside = read_object(run_dir / "checkpoints" / str(saved) / "run.json")
        position = int(beside["position"]["state"]["position"])
    end = position + (step - saved) * batches.global_batch_size
    first = end - batches.global_batch_size
    left = (batches.positions_left().stop - position) // batches.global_batch_size
    num_steps = config.train.num_steps or saved + left
    if not (1 <= step <= num_steps and first >= 0):
        raise ConfigError(f"--step {step}: the steps of this run are 1 to {num_steps:,}.")
    examples = batches.examples_before({"position": end})
    files = getattr(data.train, "files", None)
    names = [] if files is None else [str(files[i]) for i in examples]
    if isinstance(data.train, Concatenated):
        names = list(data.train.places(examples))
    return Rows(step, first / batches.num_examples, tuple(map(int, examples)), tuple(names))
