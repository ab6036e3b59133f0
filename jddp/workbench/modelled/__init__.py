"""GPUs that are only described: compile for them without one, and model how long a program takes.

Nothing here is measured. `described_mesh` needs JAX's plugin for CUDA, and `walk` the text of a
program that was compiled for it.
"""

from jddp.workbench.modelled.described import described_mesh
from jddp.workbench.modelled.gpus import GPUS, Gpu
from jddp.workbench.modelled.links import Fabric
from jddp.workbench.modelled.schedule import walk
from jddp.workbench.modelled.timeline import Timeline, Transfer

__all__ = [
    "GPUS",
    "Fabric",
    "Gpu",
    "Timeline",
    "Transfer",
    "described_mesh",
    "walk",
]
