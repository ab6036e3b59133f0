"""The progress of a run: one value, which the loop holds and a checkpoint keeps with the state.

    progress = dataclasses.replace(progress, step=4, position=position)
    Progress.from_json(4, json.loads(json.dumps(progress.to_json()))) == progress

A field that resuming needs is added here, and nowhere else.
"""

import dataclasses
from typing import NamedTuple

from jddp.checkpoint.plain import from_plain, to_plain
from jddp.data.periods import Reached
from jddp.ground.typing import JsonObject, Metrics, Settings
from jddp.trainer.reports.files import as_json

Losses = tuple[tuple[int, float], ...]  # of the last steps, each with its step


class Skips(NamedTuple):
    """Steps that were skipped.

    Attributes:
      total: Number of skipped steps.
      in_a_row: Number of skipped steps since the last one that was taken, not counting steps that
        only lower the loss scale.
      loss_scale: Loss scale of the last step, if it was skipped; else None.
    """

    total: int = 0
    in_a_row: int = 0
    loss_scale: float | None = None


NO_SKIPS = Skips()
BEGUN = Reached(0)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come, and what it has come by.

    A default is the value for a checkpoint of an earlier version, which has no such field.

    Attributes:
      step: Number of finished optimizer steps.
      position: Position in the data after the last step.
      before: How far the run had come before the last step.
      metrics: The last train record.
      evaluations: Records of evaluations; a checkpoint keeps only the last one, since the file of
        metrics has the others.
      stopped: Reason that a callback gave for ending the run, or None.
      skipped: The steps that were skipped.
      updates: Number of updates before the last step that was reported; -1 before one.
      losses: The last losses, in which spikes are found.
      best: Steps of the best checkpoints, the best first.
      world: Processes, devices and options by which a step divides rows.
      learning_rate: Learning rate of the last step, if it is known.
      buckets: Buckets of a step.
      program: Digests of model, loss and optimizer.
      config: Settings of the run; None where there are none.
      manifest: Versions of the software, and facts.
      plan: Settings that may differ when the run resumes.
    """

    step: int = 0
    position: JsonObject = dataclasses.field(default_factory=dict)
    before: Reached = BEGUN
    metrics: Metrics = dataclasses.field(default_factory=dict)
    evaluations: list[JsonObject] = dataclasses.field(default_factory=list)
    stopped: str | None = None
    skipped: Skips = NO_SKIPS
    updates: int = -1
    losses: Losses = ()
    best: list[int] = dataclasses.field(default_factory=list)
    world: Settings = dataclasses.field(default_factory=dict)
    learning_rate: float | None = None
    buckets: list[JsonObject] = dataclasses.field(default_factory=list)
    program: JsonObject | None = None
    config: Settings | None = None
    manifest: Settings = dataclasses.field(default_factory=dict)
    plan: Settings = dataclasses.field(default_factory=dict)

    def to_json(self) -> JsonObject:
        """Values of JSON, without the step, which a checkpoint has anyway.

        Raises:
          ConfigError: If the position holds values that would not come back equal.
        """
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        del fields["step"]
        fields["position"] = to_plain(self.position, "The position of the training batches")
        for name in ("metrics", "evaluations"):
            fields[name] = as_json(fields[name])
        return fields

    @classmethod
    def from_json(cls, step: int, beside: Settings) -> "Progress":
        """The progress of a checkpoint, which an earlier version may have written.

        Raises:
          LookupError, TypeError or ValueError: If this cannot be its run data.
        """
        names = {x.name for x in dataclasses.fields(cls)}
        fields = {"updates": step - 1} | {name: x for name, x in beside.items() if name in names}
        fields["position"] = from_plain(beside["position"])
        fields["before"] = Reached(*beside.get("before", [step - 1]))
        total, in_a_row, *scale = beside["skipped"]
        fields["skipped"] = Skips(int(total), int(in_a_row), *scale)
        fields["losses"] = tuple((int(at), loss) for at, loss in beside.get("losses", []))
        return cls(**fields | {"step": step})
