"""The input and the result of a part."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jddp.inspection.doctor import OK, Finding

SKIP = "skip"  # a level: the part was not tried, or nothing could be measured


class Machine(NamedTuple):
    """The devices of this machine.

    Attributes:
      platform: "gpu" or "cpu".
      num_devices: Number of devices.
      kind: Name of the first device.
    """

    platform: str
    num_devices: int = 0
    kind: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether the devices are GPUs: then sizes are large."""
        return self.platform == "gpu"


class PartResult(NamedTuple):
    """The result of a part, as its process returns it.

    Attributes:
      level: Level of a finding, or "skip".
      what: The result, in a few words.
      fix: Fix, if the level is not ok.
      details: Measurements, in Markdown.
      facts: Further facts for the process that starts the parts.
    """

    level: str
    what: str
    fix: str = ""
    details: str = ""
    facts: Mapping[str, Any] = {}


class Part(NamedTuple):
    """A part on the page.

    Attributes:
      title: Title of its section.
      result: The result.
      seconds: Time that it took.
    """

    title: str
    result: PartResult
    seconds: float = 0.0


def worst(*findings: Finding) -> Finding:
    """The first finding that is not ok; if all are ok, the first."""
    return next((finding for finding in findings if finding.level != OK), findings[0])
