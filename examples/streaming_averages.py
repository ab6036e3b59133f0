"""Local SGD that averages only a part of the parameters at each outer step.

    python examples/streaming_averages.py

Each replica trains alone for `every` steps; then one fragment of the parameters is averaged, the
next one after `every` more steps, and so on in turn. The bytes of an outer step are 1 / fragments
of those of `jddp.LocalSteps`, and its peak on the network is as much lower.

What replicas do in an outer step is an object that `jddp.LocalSteps` is given: one file, and no
change in jddp.

References:
  Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.
  https://arxiv.org/abs/2501.18512, section 2.2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

import jddp
from jddp.reduce.backward import Finished


@dataclasses.dataclass(frozen=True)
class NextFragment:
    """An outer step that averages one fragment of the parameters, and in the next one another.

    Attributes:
      num_fragments: Parts of the parameters: every n-th array is in the same one.
    """

    num_fragments: int = 2

    def init(self, params):
        """Returns what replicas share: also which fragment is next."""
        return {"params": params, "turn": jnp.int32(0)}

    def __call__(self, reducer, params, outer):
        """Averages the fragment whose turn it is; the others stay each replica's own."""

        def average(fragment):
            leaves, treedef = jax.tree.flatten(params)
            start = jax.tree.leaves(outer["params"])
            chosen = range(fragment, len(leaves), self.num_fragments)
            moved = [start[i] - leaves[i] for i in chosen]
            mean, _ = reducer(Finished(moved), (), reducer.plan(moved))
            for i, difference in zip(chosen, mean, strict=True):
                leaves[i] = start[i] = start[i] - difference
            return treedef.unflatten(leaves), treedef.unflatten(start)

        branches = [lambda i=i: average(i) for i in range(self.num_fragments)]
        params, start = lax.switch(outer["turn"], branches)
        turn = (outer["turn"] + 1) % self.num_fragments
        return params, {**outer, "params": start, "turn": turn}


def loss_fn(model, batch):
    """The squared error of each row."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def main(num_steps=60, every=5):
    """Trains with one to four fragments; returns the last losses."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8), dtype=np.float32)
    batch, losses = {"x": x, "y": np.tanh(x[:, :3])}, []
    for num_fragments in (1, 2, 4):
        model = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(3)])
        local_steps = jddp.LocalSteps(every, NextFragment(num_fragments))
        ddp = jddp.DataParallel(model, optax.adam(1e-2), loss_fn, strategy=local_steps)
        state = ddp.init(seed=0, batch=batch)
        for _ in range(num_steps):
            state, metrics = ddp.step(state, batch)
        losses.append(float(metrics["loss"]))
        print(f"{num_fragments} fragments, one every {every} steps: loss {losses[-1]:.5f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
