"""`python -m jddp.launch --num-processes N ... -m package.module`: starts the processes of a job.

Starts a program once for each process of a job on this machine, passes each its rank, shows their
output, and ends and restarts them together. The program may be any that joins the job by
`jax.distributed` as jddp does, or by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser, enter
from jddp.config.permissions import expand
from jddp.distributed.identity import check_address
from jddp.distributed.join import START
from jddp.errors import UsageError, report
from jddp.launcher import ssh
from jddp.launcher.supervisor import Supervisor
from jddp.launcher.workers import Launch, name_logs

EXAMPLES = """\
examples:
  python -m jddp.launch --num-processes 2 -m jddp.train --config gpt_stdlib
  python -m jddp.launch --num-processes 4 --max-restarts 3 my_script.py --my-argument 1
  python -m jddp.launch --num-processes 8 --num-nodes 2 --node-rank 0 --coordinator node-0:1234 \\
      -m jddp.train      # on the other node the same, with --node-rank 1
  python -m jddp.launch --hosts node-0,node-1 --num-processes 8 -m jddp.train      # by ssh
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code of the first process that failed, or 0."""
    return enter(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.start_seconds is not None:
        os.environ[START] = str(arguments.start_seconds)  # which the processes inherit
    if arguments.hosts is not None and not arguments.obey_input:
        return _run_on_hosts(arguments, argv)
    launch = plan_launch(arguments)
    if launch.num_nodes > 1 and (launch.coordinator is None or arguments.node_rank is None):
        raise UsageError(
            f"--num-nodes {launch.num_nodes} needs --coordinator host:port, of node 0, and "
            "--node-rank, another on each node."
        )
    script = launch.command[0]
    if not (arguments.module or Path(script).is_file()):
        raise UsageError(f"there is no script {script!r}. Options of the launcher come before it.")
    if arguments.obey_input:
        ssh.obey_input(arguments.grace_seconds)
    code = Supervisor(
        launch, max_restarts=arguments.max_restarts, grace_seconds=arguments.grace_seconds
    ).run()
    return min(code, ssh.LOST - 1) if arguments.obey_input else code


def _run_on_hosts(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    hosts = ssh.parse_hosts(arguments.hosts)
    if arguments.node_rank is not None:
        raise UsageError(
            "--hosts and --node-rank cannot be combined: --hosts starts and numbers all nodes."
        )
    if arguments.num_nodes not in (1, len(hosts)):
        raise UsageError(
            f"--num-nodes {arguments.num_nodes}, but --hosts has {len(hosts)}: give --hosts alone."
        )
    arguments.num_nodes = len(hosts)
    launch = plan_launch(arguments)
    coordinator, given = launch.coordinator, ["--logs", str(launch.logs), *argv]
    if coordinator is None:
        coordinator = ssh.choose_coordinator(hosts[0])
        given = ["--coordinator", coordinator, *given]
    report(f"{', '.join(hosts)} connect at {coordinator}")
    may_lose = launch.min_processes is not None
    return ssh.launch_on(hosts, given, arguments.grace_seconds, may_lose=may_lose)


def plan_launch(arguments: argparse.Namespace) -> Launch:
    """The launch that the arguments describe.

    Raises:
      ConfigError: If the coordinator is not host:port.
      UsageError: If they cannot be combined.
    """
    command = ("-m", *arguments.module) if arguments.module else tuple(arguments.script)
    if not command:
        raise UsageError("nothing to start: end with -m package.module, or with script.py.")
    num_nodes, node_rank = arguments.num_nodes, arguments.node_rank or 0
    if node_rank >= num_nodes:
        raise UsageError(
            f"--node-rank {node_rank} must be below --num-nodes {num_nodes}: it counts from 0."
        )
    if arguments.min_processes is not None and (num_nodes == 1 or not arguments.max_restarts):
        raise UsageError(
            "--min-processes is for a job that may lose machines: it needs several (--num-nodes or "
            "--hosts) and --max-restarts."
        )
    return Launch(
        command=command,
        num_processes=arguments.num_processes,
        num_nodes=num_nodes,
        node_rank=node_rank,
        coordinator=_coordinator(arguments),
        devices_per_process=arguments.devices_per_process,
        min_processes=arguments.min_processes,
        logs=arguments.logs or name_logs(),
    )


def _coordinator(arguments: argparse.Namespace) -> str | None:
    host, port = arguments.master_addr, arguments.master_port
    if arguments.coordinator is None:
        if host is None and port is None:
            return None
        address = f"{host or '127.0.0.1'}:{port or 29500}"
        return check_address(address, "--master-addr:--master-port")
    if host is not None or port is not None:
        raise UsageError("--coordinator replaces --master-addr and --master-port: give either one.")
    return check_address(arguments.coordinator, "--coordinator")


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
    add("--hosts", help="a,b,...: start all nodes from here, through ssh")
    add("--num-nodes", "--nnodes", type=_positive, default=1, help="machines of the job")
    add("--node-rank", "--node-rank", type=_count, help="number of this machine, from 0")
    add("--coordinator", help="host:port on node 0; a free port here if it is the only one")
    add("--min-processes", type=_positive, help="elastic: enough to continue if a machine is lost")
    add("--master-addr", "--master-addr", help="host of --coordinator")
    add("--master-port", "--master-port", help="port of --coordinator")
    add("--logs", type=expand, help="folder for the output of each process (logs/DATE-TIME-PID)")
    add("--start-seconds", type=_positive, help="rendezvous timeout (300)")
    add("--grace-seconds", type=float, default=10.0, help="from SIGTERM to SIGKILL (%(default)g)")
    add("--obey-input", action="store_true", help="read signals from standard input (for --hosts)")
    add("-m", dest="module", nargs=rest, help="a module to run, and its arguments")
    add("script", nargs=rest, help="a script to run, and its arguments")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
