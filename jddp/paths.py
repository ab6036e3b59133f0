"""Chooses parameters by regular expressions for their paths, such as "backbone/.*"."""

import difflib
import re
from collections.abc import Iterable

from jddp.errors import ConfigError


def match_paths(
    patterns: Iterable[str], paths: Iterable[str], *, key: str
) -> dict[str, re.Match[str]]:
    """Returns the paths that a pattern matches, each with its first match.

    Args:
      patterns: Regular expressions, each for whole paths.
      paths: Paths of the parameters, such as "backbone/Dense_0/kernel".
      key: Name of the option or config key that holds the patterns, for the error.

    Raises:
      ConfigError: If one is no regular expression, or matches no path, with the nearest ones.
    """
    paths = [*paths]
    matches = dict[str, re.Match[str]]()
    for pattern in patterns:
        try:
            found = {x: match for x in paths if (match := re.fullmatch(pattern, x))}
        except re.error as error:
            raise ConfigError(f"{key}: {pattern!r} is no regular expression: {error}.") from error
        if not found:
            nearest = ", ".join(map(repr, difflib.get_close_matches(pattern, paths, cutoff=0)))
            raise ConfigError(
                f"{key}: {pattern!r} matches no whole path of a parameter. The nearest are "
                f"{nearest}."
            )
        matches = found | matches
    return matches
