"""The collectives of a compiled program's text, as pairs that are easily compared."""

from jddp.inspection.collectives import collectives as collectives_of
from jddp.inspection.hlo import read_program


def collectives(text):
    """(op, number of elements) of each collective, in the program's order."""
    found = collectives_of(read_program(text))
    return [(collective.op, collective.num_elements) for collective in found]
