"""Weak scaling of a modelled step: the same rows on each GPU, and more GPUs.

Steps are compiled for one host and for eight. More hosts are not compiled for: they run the program
of eight, whose collectives take as long as they would over all hosts.

Predictions are upper bounds: `benchmarks/predictions.py` holds the same arithmetic against what
others have published, which is less.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from jddp.engine.trainable import Steps
from jddp.errors import ConfigError
from jddp.inspection.hlo import HloProgram
from jddp.typing import JsonObject
from jddp.workbench.modelled.compiling import CompiledFor, compile_for
from jddp.workbench.modelled.described import Target
from jddp.workbench.modelled.schedule import walk

NUM_HOSTS = (1, 8, 32, 128)
COMPILED = (1, 8)
# In points of efficiency, the median and the worst, by benchmarks/predictions.py.
MEASURED_ERROR = "published runs reach 8.5 points less, at worst 28.8"


@dataclass(frozen=True)
class ScaledStep:
    """A step on some number of hosts.

    Attributes:
      num_devices: GPUs of all hosts.
      step_seconds: Time of the step.
      waiting_share: The share of it that waits for any collective.
      efficiency: Time of the step on one host, divided by its time here.
      compiled_for: GPUs for which its program was compiled.
    """

    num_devices: int
    step_seconds: float
    waiting_share: float
    efficiency: float
    compiled_for: int

    @property
    def origin(self) -> str:
        """Where its schedule is from."""
        if self.compiled_for == self.num_devices:
            return "compiled"
        return f"the schedule of {self.compiled_for} GPUs"

    def as_json(self) -> JsonObject:
        """Its figures."""
        return asdict(self)


def weak_scaling(target: Target, steps: Steps, own: CompiledFor) -> tuple[ScaledStep, ...]:
    """Models a step on 1, 8, 32 and 128 hosts, with the rows that each host has.

    Args:
      target: The GPUs and links of one world.
      steps: The step.
      own: The step as compiled for that world.

    Raises:
      ConfigError: If the step is refused on one host, or on eight.
    """
    programs = {num: _program(target, num, steps, own) for num in COMPILED}
    return tuple(_scaled(target, programs))


def _program(target: Target, num_hosts: int, steps: Steps, own: CompiledFor) -> HloProgram:
    if num_hosts == target.fabric.num_hosts:
        return own.program
    other = _resized(target, num_hosts)
    try:
        return compile_for(other, steps, own.rows).program
    except ConfigError as error:  # such as a group of more GPUs than a host has
        raise ConfigError(f"Scaling needs the step for {other} too. {error}") from error


def _resized(target: Target, num_hosts: int, num_stretched: int = 1) -> Target:
    fabric = replace(target.fabric, num_hosts=num_hosts, num_stretched=num_stretched)
    return replace(target, fabric=fabric)


def _scaled(target: Target, programs: dict[int, HloProgram]) -> Sequence[ScaledStep]:
    found: list[ScaledStep] = []
    for num_hosts in NUM_HOSTS:
        compiled = max(x for x in COMPILED if x <= num_hosts)
        world = _resized(target, num_hosts, num_hosts // compiled)
        time = walk(programs[compiled], world.gpu, world.fabric)
        first = found[0].step_seconds if found else time.step_seconds
        found.append(
            ScaledStep(
                num_devices=world.fabric.num_devices,
                step_seconds=time.step_seconds,
                waiting_share=1 - time.compute_seconds / time.step_seconds,
                efficiency=first / time.step_seconds,
                compiled_for=compiled * world.fabric.devices_per_host,
            )
        )
    return found
