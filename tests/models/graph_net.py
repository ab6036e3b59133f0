"""Message passing over small molecules, padded to one size: the energy of each. Linen."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

NUM_NODES, NUM_EDGES, NUM_ATOMS, NUM_BONDS = 6, 8, 4, 3


class Messages(nn.Module):
    """Each node hears from its neighbours, along edges of several kinds."""

    width: int

    @nn.compact
    def __call__(self, nodes, edges):
        hear = jax.vmap(lambda x, places: x[places])
        add_up = jax.vmap(lambda x, places: jax.ops.segment_sum(x, places, NUM_NODES))
        bonds = nn.Embed(NUM_BONDS, self.width)(edges["bond"])
        said = nn.Dense(self.width)(jnp.concatenate([hear(nodes, edges["from"]), bonds], -1))
        said = jnp.where(edges["is_real"][..., None], nn.silu(said), 0.0)
        heard = add_up(said, edges["to"])
        return nn.LayerNorm()(nodes + nn.Dense(self.width)(heard))


class GraphNet(nn.Module):
    width: int = 8
    num_rounds: int = 2

    @nn.compact
    def __call__(self, nodes, edges):
        x = nn.Embed(NUM_ATOMS, self.width)(nodes["atom"])
        for _ in range(self.num_rounds):
            x = Messages(self.width)(x, edges)
        energies = nn.Dense(1)(nn.silu(x))[..., 0]
        return jnp.where(nodes["is_real"], energies, 0.0).sum(-1) / NUM_NODES


def loss_fn(model, batch, train):
    errors = model(batch["graph"]["nodes"], batch["graph"]["edges"]) - batch["energy"]
    return errors**2, {"absolute_error": jnp.abs(errors)}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    num_nodes = rng.integers(2, NUM_NODES + 1, size=(rows, 1))
    num_edges = rng.integers(1, NUM_EDGES + 1, size=(rows, 1))
    atoms = rng.integers(NUM_ATOMS, size=(rows, NUM_NODES), dtype=np.int32)
    is_real = np.arange(NUM_NODES) < num_nodes
    ends = rng.integers(NUM_NODES, size=(2, rows, NUM_EDGES)) % num_nodes
    edges = {
        "from": ends[0].astype(np.int32),
        "to": ends[1].astype(np.int32),
        "bond": rng.integers(NUM_BONDS, size=(rows, NUM_EDGES), dtype=np.int32),
        "is_real": np.arange(NUM_EDGES) < num_edges,
    }
    energy = np.where(is_real, atoms, 0).mean(-1) - edges["bond"].mean(-1)
    nodes = {"atom": atoms, "is_real": is_real}
    return {"graph": {"nodes": nodes, "edges": edges}, "energy": energy.astype(np.float32)}
