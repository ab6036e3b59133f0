"""Contenders that live in processes of their own and take turns on command.

A crew is one or more processes that step together. Its contender for a turn is a line of JSON on
its input, and every process answers with the seconds that its steps took. Between turns it sleeps.

    crew = Crew("benchmarks/crew_jddp.py", environments)   # here
    seconds = crew.turn({"job": "mlp", "num_steps": 8})

    serve(make_turn)                                        # there
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jddp.distributed.group import HUGE_PAGES

ROOT = Path(__file__).resolve().parent.parent
Turn = Callable[[int], float]  # Takes that many steps; returns the seconds of all.


class Crew:
    """Processes that step together."""

    def __init__(self, script: str, environments: list[dict[str, str]]) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "OMP_"))}
        kept["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks")))
        self._processes = [
            subprocess.Popen(
                [sys.executable, ROOT / "benchmarks" / script],
                env=kept | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for environment in environments
        ]

    def turn(self, contender: dict[str, Any], num_steps: int) -> float:
        """Returns seconds per step, those of the slowest process."""
        line = json.dumps([contender, num_steps])
        for process in self._processes:
            print(line, file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self._processes]
        if "" in answers:
            raise RuntimeError(f"A process died while it trained {contender}.")
        return max(map(float, answers)) / num_steps

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def serve(make_turn: Callable[..., Turn]) -> None:
    """Answers turns until the crew is closed, building a contender when it is first named."""
    # Libraries greet on stdout, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns: dict[str, Turn] = {}
    for line in sys.stdin:
        contender, num_steps = json.loads(line)
        name = json.dumps(contender)
        if name not in turns:
            turns[name] = make_turn(**contender)
        print(turns[name](num_steps), file=answers, flush=True)


def free_port() -> int:
    """Returns a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def jddp_crew(num_processes: int, num_devices: int) -> Crew:
    """Starts processes of jddp with so many virtual devices in all, as `jddp.launch` does."""
    environ = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices // num_processes)}
    environ |= HUGE_PAGES
    if num_processes == 1:
        return Crew("crew_jddp.py", [environ])
    environ |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    environ |= {"JAX_NUM_PROCESSES": str(num_processes)}
    return Crew(
        "crew_jddp.py", [environ | {"JAX_PROCESS_ID": str(i)} for i in range(num_processes)]
    )


def torch_crew(num_processes: int, num_threads: int, *, has_huge_pages: bool = False) -> Crew:
    """Starts processes of PyTorch with so many threads each."""
    environ = {"OMP_NUM_THREADS": str(num_threads), "WORLD_SIZE": str(num_processes)}
    if has_huge_pages:
        environ |= HUGE_PAGES
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return Crew("crew_torch.py", [environ | {"RANK": str(i)} for i in range(num_processes)])
