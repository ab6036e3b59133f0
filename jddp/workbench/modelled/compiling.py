"""Compiles a step for described GPUs, with the rows of its batch divided over their hosts.

own = compile_for(target, ddp.steps, rows_of_host(target, ddp.steps, batch))
"""

from typing import NamedTuple

import jax

from jddp.engine.mesh import count_processes
from jddp.engine.trainable import Steps
from jddp.errors import ConfigError
from jddp.inspection.hlo import HloProgram, read_program
from jddp.modules.rows import count_rows
from jddp.typing import Batch, Leaf
from jddp.workbench.modelled.described import Target


class CompiledFor(NamedTuple):
    """A step that was compiled for described GPUs.

    Attributes:
      steps: The step on their mesh.
      rows: Shapes of the rows of one host.
      compiled: The program.
    """

    steps: Steps
    rows: Batch
    compiled: jax.stages.Compiled

    @property
    def program(self) -> HloProgram:
        """The program as it was scheduled."""
        return read_program(self.compiled.as_text() or "")


def compile_for(target: Target, steps: Steps, rows: Batch) -> CompiledFor:
    """Compiles a step for other devices than its own.

    Args:
      target: The devices.
      steps: The step.
      rows: Shapes of the rows of one host of the target.

    Raises:
      ConfigError: If JAX cannot compile for the target, the rows do not divide over it, or the
        step does not compile for it.
    """
    other = steps.on(target.mesh())
    other.rows.check(rows)
    lowered = other.lower(rows)
    try:
        return CompiledFor(other, rows, lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The step does not compile for {target}: {reason}. Change what the compiler names, or "
            "explain the step for the devices at hand, without a target."
        ) from error


def rows_of_host(target: Target, steps: Steps, batch: Batch) -> Batch:
    """Divides a global batch over the hosts of a target.

    Args:
      target: The devices.
      steps: The step.
      batch: Rows of one process of the step's own mesh, or their shapes.

    Returns:
      Shapes of the rows of one host.

    Raises:
      ConfigError: If the rows do not divide over the hosts.
    """
    rows, num_hosts = count_processes(steps.mesh) * count_rows(batch), target.fabric.num_hosts
    if rows % num_hosts:
        raise ConfigError(
            f"A batch of {rows} rows does not divide over {num_hosts} hosts. "
            f"Choose a multiple of {num_hosts}."
        )

    def shape(x: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows // num_hosts, *x.shape[1:]), x.dtype)

    return jax.tree.map(shape, batch)
