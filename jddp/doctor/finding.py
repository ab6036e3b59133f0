"""A finding of a check, with its level and its fix."""

import textwrap
from dataclasses import dataclass

OK, WARN, BAD = "ok", "warn", "bad"
COLUMNS = 80


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      level: "ok"; "warn", if it may slow a job down or confuse; "bad", if it will stop a job.
      what: Description of the finding.
      fix: Fix, where it is not ok.
    """

    level: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        """Lines of at most 80 columns, the first with the level."""
        lines = textwrap.wrap(self.what, COLUMNS - 8) + textwrap.wrap(self.fix, COLUMNS - 8)
        heads = [f"  {self.level:<4}", *["      "] * (len(lines) - 1)]
        return "\n".join(f"{head}  {line}" for head, line in zip(heads, lines, strict=True))
