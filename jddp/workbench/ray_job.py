"""A job on a Ray cluster: each of its processes is the child of a worker of Ray Train.

    code = jddp.launch("-m", "jddp.train", "--config", "gpt_stdlib", num_processes=4, ray="auto")

Ray places the workers, shows their output, and starts all again when one is lost. A worker takes
its rank from Ray Train, and is the launcher of one of several machines (`NodeRunner`). If a process
fails, the launchers restart all processes, without Ray. The board, an actor of its own, passes the
signals of the driver to all workers, and the first failure to the driver.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from jddp.distributed import launcher
from jddp.distributed.failure_file import RESULT, describe_failure
from jddp.distributed.group import Launch
from jddp.distributed.identity import check_address
from jddp.distributed.join import START, read_seconds
from jddp.distributed.launcher import Failure
from jddp.distributed.signals import Signals
from jddp.ground import errors
from jddp.ground.errors import ExitCode, report

with suppress(ImportError):  # `RayRunner` reports that Ray is missing.
    import ray.train.collective
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

_ASK_SECONDS = 0.5  # Time between two questions to the board.
_PASSED_ON = ("JAX_", "JDDP_", "NCCL_", "PYTHONPATH", "XDG_CACHE_HOME", "XLA_")
# Workers start in the driver's folder, not in a folder of Ray; failures are noticed sooner.
_DEFAULTS = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}


class _Board:
    """An actor that passes signals to all workers, and the first failure to the driver."""

    def __init__(self) -> None:
        self._num_signals = 0
        self._first: Failure | None = None

    def begin(self) -> int:
        """Forgets the failure of earlier workers; returns the number of signals."""
        self._first = None
        return self._num_signals

    def tell(self, failure: Failure | None = None, num_signals: int = 0) -> Any:
        """Takes a failure and a number of signals; returns the number and the first failure."""
        self._num_signals = max(self._num_signals, num_signals)
        if failure and (self._first is None or self._first.code == ExitCode.ANOTHER_FAILED):
            self._first = failure
        return self._num_signals, self._first


class _DriverSignals(Signals):
    """The signals that the driver has received, for which a worker asks the board."""

    def __init__(self, board: Any) -> None:
        super().__init__()
        self._board = board

    @contextmanager
    def received(self) -> Iterator[None]:
        with ExitStack() as stack:
            is_over = Event()
            stack.enter_context(ThreadPoolExecutor(1)).submit(self._ask_until, is_over)
            stack.callback(is_over.set)
            yield

    def _ask_until(self, is_over: Event) -> None:
        while not is_over.wait(_ASK_SECONDS):
            number, _ = ray.get(self._board.tell.remote())
            self.numbers[:] = [signal.SIGTERM] * number


class RayRunner:
    """Runs the processes of a launch on a Ray cluster, which places and restarts them.

    Args:
      launch: Command, and number of processes on all nodes. Each process gets
        `devices_per_process` GPUs (default 1) if the cluster has any, else as many CPU devices and
        CPUs of Ray.
      address: host:port of the head of the cluster; "auto" for RAY_ADDRESS, or this machine's. It
        is ignored in a program that is already connected.

    Raises:
      UsageError: If Ray is not installed.
    """

    def __init__(self, launch: Launch, address: str):
        if "ray.train.v2.jax" not in sys.modules:
            raise errors.UsageError(
                "a job on Ray needs Ray 2.60 or newer: pip install 'jddp[ray]'."
            )
        self._launch = replace(launch, logs=launch.logs.absolute())
        self._address = address

    def run(self, signals: Signals) -> Failure | None:
        """Has Ray Train start and restart the processes, for `supervise`.

        Raises:
          ConfigError: If the address is not host:port.
          CoordinatorError: If no cluster answers there.
          DeviceError: If the cluster is too small for JDDP_START_SECONDS.
        """
        launch = self._launch
        os.environ.update(_DEFAULTS | os.environ)
        with ExitStack() as stack:
            if not ray.is_initialized():
                stack.callback(ray.shutdown)
                _connect(self._address)
            stack.enter_context(signals.received())  # Ray has a handler of its own from here on
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            board: Any = ray.remote(_Board).options(num_cpus=0, label_selector=here).remote()
            each = _resources(launch.devices_per_process or 1)
            report(f"{launch.num_processes} processes on Ray; logs in {launch.logs}")
            missing = partial(_missing, each, launch.min_processes or launch.num_processes)
            # A task, not a thread: a thread could not leave Ray before the trainer has ended.
            task = ray.remote(_fit).options(num_cpus=0, label_selector=here, max_retries=0)
            fitting = task.remote(launch, board, each, os.getcwd(), _variables())
            stack.callback(ray.cancel, fitting, force=True)
            error = _wait(fitting, board, missing, signals)
            _, first = ray.get(board.tell.remote())
        return _conclude(first, error)  # The message stands below the last lines of Ray.


def _resources(num_devices: int) -> dict[str, int]:
    """The resources that a process asks Ray for."""
    has_gpus = ray.cluster_resources().get("GPU") and os.environ.get("JAX_PLATFORMS") != "cpu"
    return {"GPU": num_devices, "CPU": 1} if has_gpus else {"CPU": num_devices}


def _variables() -> dict[str, str]:
    """The environment variables that the driver passes on."""
    return {name: x for name, x in os.environ.items() if name.startswith((*_PASSED_ON, *_DEFAULTS))}


def _fit(
    launch: Launch, board: Any, each: dict[str, int], folder: str, environ: dict[str, str]
) -> None:
    """Runs Ray Train, with one worker for each process, in the driver's folder."""
    os.environ.update(environ)
    most, least = launch.num_processes, launch.min_processes
    workers = (least, most) if least else most
    asked = ScalingConfig(num_workers=workers, use_gpu="GPU" in each, resources_per_worker=each)
    limit = FailureConfig(max_failures=launch.max_restarts)
    kept = RunConfig(storage_path=str(launch.logs), failure_config=limit)
    work = partial(_work, launch, board, folder, environ)
    # Ray leaves jax.distributed, and the GPUs, to the child.
    JaxTrainer(work, jax_config=JaxConfig(), scaling_config=asked, run_config=kept).fit()


def _work(launch: Launch, board: Any, folder: str, environ: dict[str, str]) -> None:
    """Runs the process of a worker, and restarts it together with the processes of the others."""
    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        if not os.path.isdir(folder):
            raise errors.ConfigError(
                f"{socket.gethostname()} has no folder {folder}; the driver has one."
            )
        os.chdir(folder)
    os.environ.update(environ)
    context = ray.train.get_context()
    begun = None
    if (rank := context.get_world_rank()) == 0:
        address = launcher.free_address(f"{ray.util.get_node_ip_address()}:0")
        begun = address, ray.get(board.begin.remote())
    address, num_signals = ray.train.collective.broadcast_from_rank_zero(begun)
    size = context.get_world_size()
    own = replace(launch, num_processes=1, num_nodes=size, node_rank=rank, coordinator=address)
    with TemporaryDirectory() as new:
        os.environ[RESULT] = str(Path(new, "result.json"))
        if num_signals:
            data = describe_failure(rank, ExitCode.PREEMPTED)
            failure: Failure | None = Failure(data, "was stopped while no process ran")
        else:
            failure = launcher.NodeRunner(own).run(_DriverSignals(board))
        ray.get(board.tell.remote(failure))
        if failure is None and os.listdir(new):  # Ray keeps metrics that come with a checkpoint.
            metrics = json.loads(Path(os.environ[RESULT]).read_text())
            with suppress(RuntimeError):  # This node may not see the folder of logs.
                ray.train.report(metrics, ray.train.Checkpoint(new) if rank == 0 else None)
    if failure is not None and failure.code != ExitCode.PREEMPTED and not launch.max_restarts:
        raise RuntimeError(str(failure))  # Ray reports it; else it would start all again.


def _connect(address: str) -> None:
    try:
        if address != "auto":
            host, _, port = check_address(address, "--ray").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        ray.init(address=address)
    except (OSError, RuntimeError, ValueError) as error:
        text = f"--ray {address}: no cluster of `ray start --head` answers there"
        raise errors.CoordinatorError(f"{text} ({' '.join(str(error).split())}).") from error


def _missing(each: Mapping[str, int], num_processes: int) -> str:
    """The resources that the job needs and the cluster has, if they are too few; else empty."""
    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if sum(min(int(x.get(k, 0) // n) for k, n in each.items()) for x in there) >= num_processes:
        return ""
    asked = " and ".join(f"{number} {name}" for name, number in each.items())
    has = ", ".join(" and ".join(f"{x.get(name, 0):g} {name}" for name in each) for x in there)
    return f"{num_processes} processes need {asked} each, and the nodes of Ray have {has}"


def _wait(fitting: Any, board: Any, missing: Any, signals: Signals) -> Exception | None:
    """Passes signals on until the task that runs the trainer has ended; returns its error."""
    seconds = read_seconds(os.environ, START)
    since = time.monotonic()
    said = ""
    while not ray.wait([fitting], timeout=_ASK_SECONDS)[0]:
        board.tell.remote(num_signals=len(signals.numbers))
        before = said
        said = missing()
        if not said:
            since = time.monotonic()
        elif time.monotonic() - since > seconds:
            raise errors.DeviceError(f"{said}. Ask for less, or start more nodes.")
        elif said != before:
            report(f"{said}; waiting for more, at most {seconds} s")
    try:
        ray.get(fitting)
    except Exception as error:
        return getattr(error, "cause", error)
    return None


def _conclude(first: Failure | None, error: Exception | None) -> Failure | None:
    """Reports and returns the first failure."""
    if error is not None and (first is None or first.code == ExitCode.ANOTHER_FAILED):
        failures = getattr(error, "worker_failures", {}).values()
        lost = [x for x in failures if isinstance(x, ray.exceptions.RayError)]
        text = f"Ray has lost a worker: {' '.join(str([*lost, error][0]).split())}"
        first = Failure(describe_failure(None, ExitCode.ANOTHER_FAILED), text)
    if first is not None and first.code != ExitCode.PREEMPTED:
        report(str(first))
    return first
