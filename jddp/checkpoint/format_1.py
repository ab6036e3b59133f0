"""Checkpoints of format 1, whose `arrays.json` has no layouts: they are guessed from shapes.

Format 1 was written up to November 2026; this module is removed once no such checkpoints are left.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jddp.checkpoint.arrays import Described, Layouts
from jddp.engine.state import Layout, PerReplica, Replicated, Shape, Sharded, merged, own_layouts
from jddp.reduce.shards import shard_shape
from jddp.typing import PyTree


def guess_layouts(
    described: Described, like: Mapping[str, tuple[Layout, Shape]], num_replicas: int
) -> Layouts:
    """The likely layouts of the arrays of a checkpoint.

    Args:
      described: Description of the arrays.
      like: Layout, and shape on a single device, of each array of the program that reads; empty
        where there is no program.
      num_replicas: Number of replicas that saved the checkpoint.
    """
    shapes = {name: tuple(about["shape"]) for name, about in described.items()}

    def guess(name: str, shape: Shape) -> Layout:
        field, _, path = name.partition("/")
        layout, whole = like.get(name, (Replicated(), shape))
        if layout.is_per_replica and shape and shape[1:] == whole:
            return layout
        # Under `local_steps` the outer parameters lack the replica dim of each replica's own.
        outer = shapes.get(f"comm_state/outer/params/{path}")
        if field in ("params", "ema_params") and shape and shape[1:] == outer:
            return PerReplica()
        size, *ones = shard_shape(whole, num_replicas)
        is_cut = field == "opt_state" and shape == (num_replicas * size, *ones)
        return Sharded(whole) if is_cut else Replicated()

    return {name: guess(name, shape) for name, shape in shapes.items()}


def merge_by_model(state: PyTree, keeps_own: Callable[[Any, Any], bool]) -> PyTree:
    """Averages the rows of per-replica leaves of the model's state, which the model knows."""
    return jax.tree.map(merged, state, own_layouts(state, keeps_own))
