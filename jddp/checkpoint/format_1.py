"""Checkpoints of format 1, whose `arrays.json` does not say how an array lies: it is guessed.

Nothing else guesses. Written up to November 2026; once nobody has such checkpoints, this goes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jddp.checkpoint.arrays import Described, Layouts
from jddp.engine.state import Layout, PerReplica, Replicated, Shape, Sharded, merged, own_layouts
from jddp.reduce.parts import parts_shape
from jddp.typing import PyTree


def guess_layouts(
    described: Described, like: Mapping[str, tuple[Layout, Shape]], num_replicas: int
) -> Layouts:
    """How the arrays of a checkpoint probably lie.

    Args:
      described: What it says of them.
      like: Layout, and shape on a single device, of each array of the program that reads; none
        where there is no program.
      num_replicas: Those that saved it.
    """
    shapes = {name: tuple(about["shape"]) for name, about in described.items()}

    def guess(name: str, shape: Shape) -> Layout:
        field, _, path = name.partition("/")
        layout, whole = like.get(name, (Replicated(), shape))
        if layout.is_per_replica and shape and shape[1:] == whole:
            return layout
        # Under `local_steps` replicas have in common what has a dim less than what each has.
        outer = shapes.get(f"comm_state/outer/params/{path}")
        if field in ("params", "ema_params") and shape and shape[1:] == outer:
            return PerReplica()
        is_cut = field == "opt_state" and shape == parts_shape(whole, num_replicas)
        return Sharded(whole) if is_cut else Replicated()

    return {name: guess(name, shape) for name, shape in shapes.items()}


def merge_by_model(state: PyTree, keeps_own: Callable[[Any, Any], bool]) -> PyTree:
    """Averages the rows of what each replica keeps of the other state, which a model knows."""
    return jax.tree.map(merged, state, own_layouts(state, keeps_own))
