"""Launches a program as the processes of a job: here, on several machines or on a Ray cluster."""

from dataclasses import replace
from pathlib import Path

from jddp.distributed.failure_file import write_failure
from jddp.errors import ExitCode
from jddp.launcher.environments import Launch
from jddp.launcher.node_runner import NodeRunner
from jddp.launcher.runner import Runner, Signals
from jddp.names.plugins import tool


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

    `python -m jddp.launch` as a function, for scripts and tests. A notebook needs it only to run
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
        return supervise(NodeRunner(launch))
    return supervise(tool("ray")(launch, launch.ray))


def supervise(runner: Runner) -> int:
    """Runs processes to their end; returns the exit code of the first failure, or 0."""
    signals = Signals()
    with signals.received():
        failure = runner.run(signals)
    if failure is None:
        return ExitCode.DONE
    write_failure(failure.data)  # for the program that has started this launcher
    return failure.code
