"""Contenders of `gpu.py`: each a process of its own, which may fail and hold nobody up.

    contender = Contender(["gpu_jax.py", "gpt2_124m", "jddp"], environment)   # here
    contender.answer(deadline)                 # it has imported what it needs
    facts = contender.ask("build", deadline)   # alone on the GPU, while kernels are chosen
    taken = contender.ask(10, deadline)        # ten steps

    serve(prepare)                                                            # there

A contender that fails gives the reason in one line, `Failure`; one that does not answer in time
is ended.
"""

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Facts = dict[str, Any]
Turn = Callable[[int], Facts]  # Takes that many steps.


class Failure(Exception):
    """Why a contender is out, in one line."""


class Contender:
    """A process that prepares, builds and takes steps when it is asked to."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        path = [str(ROOT / part) for part in (".", "tests", "benchmarks")]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed with it
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, what: Any, deadline: float) -> Facts:
        """Sends a request, and returns the answer.

        Raises:
          Failure: If there is none by the deadline, a time of `time.monotonic`, or it is an error.
        """
        with contextlib.suppress(OSError):  # It has ended, which the answer will say.
            print(json.dumps(what), file=self._process.stdin, flush=True)
        return self.answer(deadline)

    def has_answered(self) -> bool:
        """Whether an answer is there, or its end."""
        return not self._answers.empty()

    def answer(self, deadline: float) -> Facts:
        """Returns the next answer; raises as `ask`."""
        seconds = max(0.0, deadline - time.monotonic())
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise Failure(f"out of time: no answer within {seconds:.0f} s") from None
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            self.close()
            raise Failure(answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return one_line(f"{how}: {lines[-1] if lines else 'no output'}")

    def close(self) -> None:
        """Ends the process and its own, and gives back their memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def one_line(text: str, longest: int = 160) -> str:
    """The text in one line, cut where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def serve(prepare: Callable[[], Callable[[], tuple[Facts, Turn]]]) -> None:
    """Answers one contender's requests until there are no more.

    Args:
      prepare: Does what may be done while others use the GPU, and returns what may not: a function
        that builds the contender, warms it up, and returns facts and turns.
    """
    # Libraries greet on stdout, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(facts: Facts) -> None:
        for name, value in facts.items():
            if isinstance(value, float) and not math.isfinite(value):
                facts[name] = str(value)  # JSON has no word for it.
        print(json.dumps(facts), file=answers, flush=True)

    try:
        build = prepare()
        answer({})
        sys.stdin.readline()
        facts, turn = build()
        answer(facts)
        for line in sys.stdin:
            answer(turn(json.loads(line)))
    except Exception as error:
        answer({"error": one_line(f"{type(error).__name__}: {error}")})
        raise
