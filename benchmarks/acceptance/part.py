"""Runs one part in this process: `python -c PROGRAM NAME PLATFORM NUM_DEVICES KIND`.

The last line of its output is the result, as JSON. A part that fails has none.
"""

import json

from acceptance.parts import PARTS
from acceptance.result import Machine, PartResult
from jddp.distributed.command import run_command

PROGRAM = """\
import sys
from acceptance.part import main
sys.exit(main(sys.argv[1:]))
"""
MARK = "jddp-part "


def main(arguments: list[str]) -> int:
    """Runs the named part, and returns an exit code."""
    name, platform, num_devices, kind = arguments
    machine = Machine(platform, int(num_devices), kind)
    return run_command(lambda: print(write_result(PARTS[name].function(machine)), flush=True))


def write_result(result: PartResult) -> str:
    """The result as a line of output."""
    return MARK + json.dumps(result._asdict())


def read_result(output: str) -> PartResult | None:
    """The result in the output of a part; None if the part has failed."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return PartResult(**json.loads(lines[-1].removeprefix(MARK))) if lines else None
