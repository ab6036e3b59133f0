"""What a step became: the collectives of a compiled program, and how its schedule hides them."""

from jddp.program.arrays import Array, largest_arrays
from jddp.program.described import described_mesh
from jddp.program.exchanges import Collective, collectives
from jddp.program.gpus import GPUS, Gpu, Network, make_network
from jddp.program.hlo import Program, read_program
from jddp.program.schedule import Timeline, Transfer, walk

__all__ = [
    "GPUS",
    "Array",
    "Collective",
    "Gpu",
    "Network",
    "Program",
    "Timeline",
    "Transfer",
    "collectives",
    "described_mesh",
    "largest_arrays",
    "make_network",
    "read_program",
    "walk",
]
