"""The section of a run's page on texts that callbacks have logged, such as samples of a model."""

import math
from collections.abc import Mapping
from html import escape

MOST_EARLIER = 8  # texts of a name, below its newest one


def draw_texts(texts: Mapping[str, Mapping[int, str]]) -> str:
    """Returns the newest text of each name, and some earlier ones to unfold.

    Args:
      texts: Texts by name and step.
    """
    return "".join(f"<h3>{escape(name)}</h3>{_of_steps(found)}" for name, found in texts.items())


def _of_steps(texts: Mapping[int, str]) -> str:
    *earlier, newest = (
        f'<p class="note">step {step:,}</p><pre>{escape(text)}</pre>'
        for step, text in texts.items()
    )
    every = max(1, math.ceil(len(earlier) / MOST_EARLIER))
    shown = "".join(reversed(earlier[::every]))
    words = f"<details><summary>earlier</summary>{shown}</details>" if shown else ""
    return newest + words
