"""The collectives of a compiled program's text, as pairs that are easily compared."""

from jddp import program


def collectives(text):
    """(op, number of elements) of each collective, in the program's order."""
    found = program.collectives(program.read_program(text))
    return [(collective.op, collective.num_elements) for collective in found]
