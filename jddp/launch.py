"""`python -m jddp.launch --num-processes N ... -m package.module`: starts the processes of a job.

Starts a program once for each process of a job on this machine, passes each its rank, shows their
output, and ends and restarts them together. The program may be any that joins the job by
`jax.distributed` as jddp does, or by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser, enter
from jddp.config.permissions import expand
from jddp.distributed.identity import check_address
from jddp.distributed.join import START
from jddp.errors import UsageError
from jddp.launcher.supervisor import run_launch
from jddp.launcher.workers import Launch, name_logs

EXAMPLES = """\
examples:
  python -m jddp.launch --num-processes 2 -m jddp.train --config gpt_stdlib
  python -m jddp.launch --num-processes 4 --max-restarts 3 my_script.py --my-argument 1
  python -m jddp.launch --ray node-0:6379 --num-processes 4 -m jddp.train --config gpt_stdlib
  python -m jddp.launch --num-processes 8 --num-nodes 2 --node-rank 0 --coordinator node-0:1234 \\
      -m jddp.train      # on the other node the same, with --node-rank 1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code of the first process that failed, or 0."""
    return enter(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.start_seconds is not None:
        os.environ[START] = str(arguments.start_seconds)  # which the processes inherit
    return run_launch(plan_launch(arguments))


def plan_launch(arguments: argparse.Namespace) -> Launch:
    """The launch that the arguments describe.

    Raises:
      ConfigError: If the coordinator is not host:port.
      UsageError: If they cannot be combined.
    """
    command = ("-m", *arguments.module) if arguments.module else tuple(arguments.script)
    if not command:
        raise UsageError("nothing to start: end with -m package.module, or with script.py.")
    if not (arguments.module or Path(command[0]).is_file()):
        raise UsageError(
            f"there is no script {command[0]!r}. Options of the launcher come before it."
        )
    num_nodes, node_rank = arguments.num_nodes, arguments.node_rank or 0
    coordinator = _coordinator(arguments)
    if num_nodes > 1 and (coordinator is None or arguments.node_rank is None):
        raise UsageError(
            f"--num-nodes {num_nodes} needs --coordinator host:port, of node 0, and --node-rank, "
            "another on each node."
        )
    if num_nodes > 1 and (coordinator or "").endswith(":65535"):
        raise UsageError(f"{coordinator}: processes connect at a port above it. Give a lower one.")
    if node_rank >= num_nodes:
        raise UsageError(
            f"--node-rank {node_rank} must be below --num-nodes {num_nodes}: it counts from 0."
        )
    if arguments.ray and (num_nodes > 1 or arguments.node_rank is not None or coordinator):
        raise UsageError("--ray places all processes: give no options of nodes and coordinator.")
    may_shrink = arguments.max_restarts and (num_nodes > 1 or arguments.ray)
    if arguments.min_processes is not None and not may_shrink:
        raise UsageError(
            "--min-processes is for a job that may lose machines: it needs --ray, or --num-nodes 2 "
            "or more, and --max-restarts."
        )
    given = vars(arguments) | {"command": command, "coordinator": coordinator}
    given |= {"node_rank": node_rank, "logs": arguments.logs or name_logs()}
    return Launch(**{field.name: given[field.name] for field in dataclasses.fields(Launch)})


def _coordinator(arguments: argparse.Namespace) -> str | None:
    given, host, port = arguments.coordinator, arguments.master_addr, arguments.master_port
    if host is None and port is None:
        return given if given is None else check_address(given, "--coordinator")
    if given is not None:
        raise UsageError("--coordinator replaces --master-addr and --master-port: give either one.")
    return check_address(f"{host or '127.0.0.1'}:{port or 29500}", "--master-addr:--master-port")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jddp.launch",
        usage="%(prog)s --num-processes N [...] (-m package.module | script.py) [arguments]",
        description="Start a program once for each process of a job.",
        epilog=EXAMPLES,
    )

    def add(name: str, peer: str = "", **how: object) -> None:
        peers = (peer, peer.replace("-", "_").replace("__", "--", 1)) if peer else ()
        parser.add_argument(*dict.fromkeys((name, *peers)), **how)  # type: ignore[arg-type]

    rest = argparse.REMAINDER
    add("--num-processes", "--nproc-per-node", type=_positive, default=1, help="processes per node")
    add("--devices-per-process", type=_positive, help="CPU devices, or GPUs, of each process")
    add("--max-restarts", "--max-restarts", type=_count, default=0, help="restarts of the job")
    add("--num-nodes", "--nnodes", type=_positive, default=1, help="machines of the job")
    add("--node-rank", "--node-rank", type=_count, help="number of this machine, from 0")
    add("--coordinator", help="host:port on node 0; a free port here if it is the only one")
    add("--min-processes", type=_positive, help="elastic: enough to continue if a machine is lost")
    add("--master-addr", "--master-addr", help="host of --coordinator")
    add("--master-port", "--master-port", help="port of --coordinator")
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help="start N in all on a Ray cluster")
    add("--logs", type=expand, help="folder for the output of each process (logs/DATE-TIME-PID)")
    add("--start-seconds", type=_positive, help="rendezvous timeout (300)")
    add("--grace-seconds", type=float, default=10.0, help="from SIGTERM to SIGKILL (%(default)g)")
    add("-m", dest="module", nargs=rest, help="a module to run, and its arguments")
    add("script", nargs=rest, help="a script to run, and its arguments")
    return parser


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} up")
    return int(text)


_positive = functools.partial(_count, least=1)


if __name__ == "__main__":
    sys.exit(main())
