"""Checks that a run resumes with the model, the loss and the optimizer that it was trained with.

`run.json` of a checkpoint keeps digests of the program, and a run that resumes compares its own.
If a config allows a change (`train.num_steps`, `checkpoint.allow_changed`), the parts that its keys
describe may differ. Another version of a package may trace the same code to different equations.
Any other difference is refused, unless `resume="changed"` continues with the new program.
"""

import dataclasses

import jax

from jddp.config.versions import source_hash
from jddp.engine.program import PARTS, Form, Program
from jddp.engine.state import TrainState
from jddp.engine.trainable import Trainable
from jddp.errors import ConfigError
from jddp.trainer.reports.run_directory import changed_keys
from jddp.typing import Batch, JsonObject, Settings

# Packages of which another version may trace the same code to different equations.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jddp")


@dataclasses.dataclass(eq=False)
class SameProgram:
    """The program of a run, and its comparison with the program of a checkpoint.

    Args:
      ddp: A `jddp.DataParallel`.
      state: The first state, for its shapes.
      batch: The first rows of this process, or their shapes.
      about: Metadata of every checkpoint, with the config, the versions and the plan.

    Attributes:
      kept: The program as `run.json` keeps it, with the changes of the run so far.
    """

    ddp: Trainable
    state: TrainState
    batch: Batch
    about: Settings

    def __post_init__(self) -> None:
        """Takes the digests of the program."""
        self._program: Program = self.ddp.steps.program(self.state, self.batch)
        versions = self.about["manifest"]["versions"]
        made_by = {name: versions[name] for name in PACKAGES}
        made_by |= {"code of jddp": source_hash(), "platform": jax.default_backend()}
        self.kept: JsonObject = {
            "digests": dict(self._program.digests),
            "form": dataclasses.asdict(self._program.form),
            "made_by": made_by,
            "changes": [],
        }

    def compare(self, step: int, beside: Settings, resume: str) -> str | None:
        """Compares with the program that a checkpoint keeps; records a difference in `kept`.

        Args:
          step: Step of the checkpoint.
          beside: Run data of the checkpoint; earlier versions kept no program in it.
          resume: "changed" to continue with another program.

        Returns:
          A note on the difference, or None.

        Raises:
          ConfigError: If a part differs that may not.
        """
        before: JsonObject | None = beside.get("program")
        if before is None:
            return None
        self.kept["changes"] = before["changes"]
        differ = self._differing(before)
        if not differ:
            return None
        now = self.kept["made_by"]
        others = [f"{k} {x} -> {now[k]}" for k, x in before["made_by"].items() if x != now[k]]
        refused = [part for part in differ if part not in self._allowed(beside)]
        if refused and not others and resume != "changed":
            raise ConfigError(
                f"The program differs from the program of step {step} of this run: another "
                f"{' and '.join(refused)}, in equations or constants. Undo the change, or choose "
                "another run.dir; or continue this run with the new program: resume='changed' "
                "(checkpoint.resume=changed of a config)."
            )
        change = {"step": step, "parts": differ, "digests": before["digests"]}
        self.kept["changes"] = [*before["changes"], {**change, "made_by": before["made_by"]}]
        if not refused:
            return None  # The keys that allow it are reported.
        why = "as resume=changed allows"
        if others:
            why = f"as another version may make them ({', '.join(others)})"
        verb = "differs" if len(differ) == 1 else "differ"
        return f"another program: {' and '.join(differ)} {verb} in equations or constants, {why}"

    def _differing(self, before: JsonObject) -> list[str]:
        """The parts that differ, of programs in the same form."""
        program = self._program
        form = Form(**before["form"])
        if form != program.form:
            try:
                program = self.ddp.steps.program(self.state, self.batch, form)
            except Exception:  # of the loss, which does not accept rows of that form
                return list(PARTS)
        return [part for part in PARTS if before["digests"][part] != program.digests[part]]

    def _allowed(self, beside: Settings) -> set[str]:
        """Parts that follow from keys of the config which differ, and may."""
        old = beside.get("config")
        new = self.about["config"]
        allowed = set[str]()
        if old is None or new is None:
            return allowed
        # A schedule without its own length has the length of the run.
        if beside["plan"]["num_steps"] != self.about["plan"]["num_steps"]:
            allowed.add("optimizer")
        for key in changed_keys(old, new):
            section = key.partition(".")[0]
            allowed |= {section} if section in PARTS else set(PARTS)
        return allowed
