"""`jddp launch --num-processes N ... -m package.module`: starts the processes of a job.

Starts a program once for each process of a job on this machine, passes each its
rank, shows their output, and ends and restarts them together. The program may
be any that joins the job by `jax.distributed` as jddp does, or by
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    jddp launch --num-processes 2 -m jddp.train --config gpt_stdlib
    jddp launch --num-processes 4 --max-restarts 3 my_script.py --my 1
    jddp launch --ray node-0:6379 --num-processes 4 -m jddp.train
    jddp launch --num-nodes 2 --node-rank 0 --coordinator n0:1234 ...
    (and on the other node the same, with --node-rank 1)
"""

import argparse
import functools
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from jddp.config.cli import Parser
from jddp.distributed.command import run_command
from jddp.distributed.group import Launch
from jddp.distributed.identity import LOOPBACK, check_address
from jddp.distributed.join import START
from jddp.distributed.launcher import NodeRunner, supervise
from jddp.ground.errors import UsageError
from jddp.ground.files import expand
from jddp.ground.names import tool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code of the first process that failed, or 0."""
    return run_command(lambda: _launch(_parser().parse_args(argv)))


def _launch(arguments: argparse.Namespace) -> int:
    if arguments.start_seconds is not None:
        os.environ[START] = str(arguments.start_seconds)  # The processes inherit it.
    return run_launch(plan_launch(arguments))


def launch(
    *command: str | Path,
    num_processes: int = 1,
    devices_per_process: int | None = None,
    max_restarts: int = 0,
    logs: str | Path | None = None,
    ray: str | None = None,
) -> int:
    """Starts the processes of a job, here or on a Ray cluster, and waits until it ends.

        code = jddp.launch("-m", "jddp.train", "--config", "gpt_stdlib", num_processes=2)

    `jddp launch` as a function, for scripts and tests. A notebook needs it only to run
    other programs: one process, such as the notebook's, uses all devices of a machine.

    Args:
      *command: Arguments of Python: a script, or "-m" and a module, with its arguments.
      num_processes: Number of processes to start.
      devices_per_process: Number of GPUs of each process, or of CPU devices if there are no GPUs.
        None splits GPUs evenly, and leaves the number of CPU devices to JAX.
      max_restarts: Number of times that all processes are restarted after one has failed.
      logs: Folder for the output of the processes; by default logs/DATE-TIME-PID.
      ray: host:port of the head of a Ray cluster; "auto" for RAY_ADDRESS, or the cluster on this
        machine; None for this machine without Ray.

    Returns:
      The exit code of the first process that failed (128 plus the number of a signal), or 0.

    Raises:
      ConfigError: If there are more processes than devices.
      CoordinatorError: If no Ray cluster answers there.
      DeviceError: If the Ray cluster is too small for JDDP_START_SECONDS.
      FileSystemError: If the folder for logs cannot be written.
      UsageError: If Ray is not installed.
    """
    launch = Launch(tuple(map(str, command)), num_processes, max_restarts=max_restarts, ray=ray)
    logs = launch.logs if logs is None else Path(logs)
    return run_launch(replace(launch, devices_per_process=devices_per_process, logs=logs))


def run_launch(launch: Launch) -> int:
    """Runs a launch, here or on Ray; returns and raises as `launch` does."""
    if launch.ray is None:
        return supervise(NodeRunner(launch).run)
    return supervise(tool("ray")(launch, launch.ray).run)


def plan_launch(arguments: argparse.Namespace) -> Launch:
    """The launch that the arguments describe.

    Raises:
      ConfigError: If the coordinator is not host:port.
      UsageError: If the arguments cannot be combined.
    """
    command = ("-m", *arguments.module) if arguments.module else tuple(arguments.script)
    host, port = arguments.master_addr, arguments.master_port
    address, name = arguments.coordinator, "--coordinator"
    if host or port:
        address, name = f"{host or LOOPBACK}:{port or 29500}", "--master-addr:--master-port"
    given = vars(arguments) | {"command": command}
    given["coordinator"] = None if address is None else check_address(address, name)
    launch = Launch(**{x.name: given[x.name] for x in fields(Launch) if given[x.name] is not None})
    nodes = launch.num_nodes
    rank = launch.node_rank
    script = "".join(command[:1])
    is_one, has_rank = nodes == 1, arguments.node_rank is not None
    may_shrink = launch.max_restarts and launch.ray
    is_there = script == "-m" or Path(script).is_file()
    both = (host or port) and arguments.coordinator
    mistakes = {
        "--coordinator replaces --master-addr and --master-port: give only one of them.": both,
        "nothing to start: end with -m package.module, or with script.py.": not command,
        f"there is no script {script!r}. Options of the launcher come first.": not is_there,
        f"--num-nodes {nodes} needs --coordinator host:port, of node 0, and --node-rank, which "
        "differs on each node.": not (is_one or (address and has_rank)),
        f"--node-rank {rank} must be below --num-nodes {nodes}, from 0 up.": rank >= nodes,
        "--ray places all processes: leave out the options for nodes and coordinator.": (
            launch.ray and (address or has_rank or not is_one)
        ),
        "--min-processes needs --ray and --max-restarts. Without Ray: torchrun --nnodes MIN:MAX.": (
            launch.min_processes and not may_shrink
        ),
    }
    if made := [mistake for mistake, is_made in mistakes.items() if is_made]:
        raise UsageError(made[0])
    return launch


def _parser() -> Parser:
    usage = "%(prog)s --num-processes N [...] (-m MODULE | SCRIPT) [...]"
    about = str(__doc__).partition("\n\n")[2]
    parser = Parser(prog="jddp launch", usage=usage, description=about)

    def add(name: str, peer: str = "", **how: object) -> None:
        how = {"metavar": "N"} | how if how.get("type") in (_positive, _whole_number) else how
        peers = (peer, peer.replace("-", "_").replace("__", "--", 1)) if peer else ()
        parser.add_argument(*dict.fromkeys((name, *peers)), **how)  # type: ignore[arg-type]

    add("--num-processes", "--nproc-per-node", type=_positive, help="processes per node (1)")
    add("--devices-per-process", type=_positive, help="GPUs, or CPU devices, of each process")
    add("--max-restarts", "--max-restarts", type=_whole_number, help="restarts of the job (0)")
    add("--num-nodes", "--nnodes", type=_positive, help="machines of the job (1)")
    add("--node-rank", "--node-rank", type=_whole_number, help="number of this machine, from 0")
    add("--coordinator", help="host:port on node 0; with one node, a free port")
    add("--min-processes", type=_positive, help="with --ray: fewest processes to resume with")
    add("--master-addr", "--master-addr", help="host of --coordinator")
    add("--master-port", "--master-port", help="port of --coordinator")
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help="start on a Ray cluster")
    add("--logs", type=expand, help="folder for the output of each process (logs/DATE-TIME-PID)")
    add("--start-seconds", type=_positive, help="rendezvous timeout (300)")
    add("--grace-seconds", type=float, help="from SIGTERM to SIGKILL (30)")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    add("script", nargs=argparse.REMAINDER, help="a script to run, and its arguments")
    return parser


def _whole_number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} up")
    return int(text)


_positive = functools.partial(_whole_number, least=1)
