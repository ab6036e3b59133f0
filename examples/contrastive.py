"""Contrastive learning over all replicas: which right half of an image belongs to which left half?

    python examples/contrastive.py

Two towers get one half each, and learn to return the same vector for the same image. The other
images of the batch are the negatives, and `jddp.all_gather` makes that the global batch rather
than a replica's: eight devices learn the same as one with all rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jddp
from jddp.data import TrainBatches, make_source

NUM_ROWS = 256


class Towers(nn.Module):
    """Two independent small networks, and a temperature."""

    @nn.compact
    def __call__(self, image):
        """Returns unit vectors (b, 64) of the left and of the right half, and a scale."""
        vectors = []
        for half in jnp.split(image, 2, axis=2):
            hidden = nn.relu(nn.Dense(256)(half.reshape(len(half), -1)))
            vector = nn.Dense(64)(hidden)
            vectors.append(vector / jnp.linalg.norm(vector, axis=-1, keepdims=True))
        return *vectors, jnp.exp(self.param("scale", nn.initializers.constant(2.0), ()))


def loss_fn(model, batch):
    """The cross entropy of matching each half with its other half among all rows.

    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML
    2021, section 2.3.
    """
    left, right, scale = model(batch["image"])
    all_left, all_right = jddp.all_gather((left, right))
    own = jax.lax.axis_index(jddp.AXIS) * len(left) + jnp.arange(len(left))
    to_right, to_left = scale * left @ all_right.T, scale * right @ all_left.T
    losses = optax.softmax_cross_entropy_with_integer_labels(to_right, own)
    losses += optax.softmax_cross_entropy_with_integer_labels(to_left, own)
    return losses / 2, {"found": to_right.argmax(-1) == own}


def main(num_steps=300, mesh=None):
    """Trains; returns the losses, and the fraction of test images whose halves are matched."""
    data = make_source("fashion_mnist").load()
    batches = TrainBatches(data.train, global_batch_size=NUM_ROWS, seed=0)
    # Padding would be among the negatives: these batches are full.
    judged = [data.test.take(np.arange(i, i + NUM_ROWS)) for i in range(0, 2560, NUM_ROWS)]
    ddp, losses = jddp.DataParallel(Towers(), optax.adam(2e-3), loss_fn, mesh=mesh), []
    state = ddp.init(seed=0, batch=judged[0])
    for i in range(1, num_steps + 1):
        state, metrics = ddp.step(state, next(batches))
        losses.append(metrics["loss"])
        if i % 50 == 0:
            print(f"step {i:3}: loss {metrics['loss']:.3f}, found {metrics['found']:.0%}")
    found = ddp.evaluate(state, judged)["found"]
    print(
        f"of the test images {found:.0%} are found among {NUM_ROWS}; by chance {1 / NUM_ROWS:.1%}"
    )
    return [float(loss) for loss in losses], found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
