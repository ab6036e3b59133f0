"""The layers of a model as a table: the number of their parameters, and the shapes of their arrays.

    layer              parameters  arrays
    Embed_0               100,480  embedding 785x128
    12 x block_*/ln         3,072  bias 128, scale 128

Layers of equal shapes whose paths differ in their first number alone share a line.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jddp.reduce.shards import Shape
from jddp.trainer.reports.lines import COLUMNS, unbroken, wrap

_Arrays = tuple[tuple[str, Shape], ...]  # of a layer, by name


def layer_table(shapes: Mapping[str, Shape]) -> list[str]:
    """A line for each layer, and one with the sum.

    Args:
      shapes: Shapes of the parameters, by path.
    """
    in_all = sum(map(math.prod, shapes.values()))
    rows = [("layer", "parameters", "arrays"), *_rows(shapes), ("sum", f"{in_all:,}", "")]
    width, digits = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = " " * (width + digits + 4)
    lines = (unbroken(f"{name:{width}}  {count:>{digits}}  ") + text for name, count, text in rows)
    return [line.rstrip() for text in lines for line in wrap(text, COLUMNS, indent=indent)]


def _rows(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str, str]]:
    alike = defaultdict[tuple[str, _Arrays], list[str]](list)
    for layer, arrays in _layers_in(shapes).items():
        alike[re.sub(r"\d+", "*", layer, count=1), arrays].append(layer)
    for (pattern, arrays), layers in alike.items():
        size = len(layers) * sum(math.prod(shape) for _, shape in arrays)
        name = layers[0] if len(layers) == 1 else f"{len(layers)} x {pattern}"
        text = ", ".join(unbroken(f"{key} {_in_words(shape)}") for key, shape in arrays)
        yield name, f"{size:,}", text


def _layers_in(shapes: Mapping[str, Shape]) -> dict[str, _Arrays]:
    """The arrays of each layer; an array outside of all layers is one by itself."""
    found = defaultdict[str, list[tuple[str, Shape]]](list)
    for path, shape in shapes.items():
        layer, _, name = path.rpartition("/")
        found[layer or name].append((name, shape))
    return {layer: tuple(arrays) for layer, arrays in found.items()}


def _in_words(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "1"
