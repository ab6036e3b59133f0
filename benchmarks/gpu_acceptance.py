"""Tries jddp on the GPUs of a machine, and writes a page of results, in minutes.

    jddp doctor --gpu-acceptance [PAGE]                          # from a checkout
    python benchmarks/gpu_acceptance.py [PAGE] [--platform cpu --num-devices 8]

docs/doctor.md lists the parts. With `--platform cpu` the procedure is tried on virtual devices.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from acceptance.run import accept

from jddp.config.cli import Parser
from jddp.distributed.command import run_command
from jddp.distributed.identity import resolve_identity
from jddp.ground.errors import ExitCode, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> ExitCode:
    parser = Parser(prog="gpu_acceptance.py", description="Test and measure the GPUs in minutes.")
    parser.add_argument("page", type=Path, nargs="?", default=Path("gpu_acceptance.md"))
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--num-devices", type=int, default=8)
    arguments = parser.parse_args(argv)
    if (num := resolve_identity().num_processes) > 1:
        raise UsageError(f"--gpu-acceptance is started once, and not as {num} processes.")
    return accept(arguments.page, platform=arguments.platform, num_devices=arguments.num_devices)


if __name__ == "__main__":
    sys.exit(main())
