"""Callbacks, which are called with reduced values only.

Loss and metrics are the same number on every process, so a callback decides the same from them on
all processes, and none waits for another forever.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from jddp.trainer.run import Run

log = logging.getLogger("jddp")


class Callback:
    """Base class of callbacks; override the methods you need. Every process calls all of them."""

    def on_step(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each optimizer step, `metrics["step"]`; `run.state` may be one ahead."""

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation of `run.state`."""

    def on_save(self, run: Run) -> None:
        """Called when a checkpoint save has started; it completes in the background."""

    def on_end(self, run: Run) -> None:
        """Called once, after the last step, evaluation and checkpoint."""


def call_each(callbacks: Sequence[Callback], hook: Callable[[Callback], None]) -> None:
    """Calls a hook of every callback, also of those behind one that raises.

    So a callback misses nothing because of another one, and in a job of several processes, each
    of which calls the same hooks, none waits for a save that a process has left out.

    Raises:
      BaseException: The first that a hook has raised; later ones are logged.
    """
    errors = list[BaseException]()
    for callback in callbacks:
        try:
            hook(callback)
        except KeyboardInterrupt:  # to leave at once
            raise
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        log.error("A callback has failed after another one: %r", later, exc_info=later)
    if errors:
        raise errors[0]
