"""Reads the collectives out of a compiled program's text."""

import math
import re

COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?\("
)
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(text):
    """(op, number of elements) of each collective, in the program's order."""
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            dims = [shape.split(",") if shape else [] for shape in SHAPE.findall(match["result"])]
            found.append((match["op"], sum(math.prod(map(int, shape)) for shape in dims)))
    return found
