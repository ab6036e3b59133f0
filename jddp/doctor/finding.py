"""A finding of a check, with its level and its fix."""

import textwrap
from typing import NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"
COLUMNS = 80


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      level: "ok"; "warn", if it may slow a job down or confuse; "bad", if it will stop a job.
      what: Description of the finding.
      fix: Fix, if the level is not ok.
    """

    level: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        """Lines of at most 80 columns, the first with the level."""
        head = f"  {self.level:<4}  "
        rest = " " * 8
        what = textwrap.wrap(self.what, COLUMNS, initial_indent=head, subsequent_indent=rest)
        fix = textwrap.wrap(self.fix, COLUMNS, initial_indent=rest, subsequent_indent=rest)
        return "\n".join([*what, *fix])
