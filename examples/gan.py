"""A GAN as two `DataParallel` objects on the same devices, each frozen in the other's loss.

    python examples/gan.py

The generator's loss needs the critic's weights and the other way round, and neither updates the
other's: each is passed to the other as `constants=`, complete and not differentiated. The data are
points on a ring of gaussians; the energy distance between generated and real points shrinks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jddp

NUM_ROWS, NUM_NOISE, NUM_BLOBS = 512, 4, 8


class Mlp(nn.Module):
    """Two hidden layers."""

    num_outputs: int

    @nn.compact
    def __call__(self, x):
        """Returns (b, num_outputs) for `x` of any (b, n)."""
        for _ in range(2):
            x = nn.leaky_relu(nn.Dense(64)(x), 0.2)
        return nn.Dense(self.num_outputs)(x)


GENERATOR, CRITIC = Mlp(num_outputs=2), Mlp(num_outputs=1)


def generator_loss(model, batch, constants):
    """The loss of generated points that the critic does not take for real (non-saturating)."""
    return nn.softplus(-CRITIC.apply({"params": constants}, model(batch["noise"]))[:, 0])


def critic_loss(model, batch, constants):
    """The classification loss of real and generated points, with a gradient penalty on real ones.

    The penalty makes training converge: Mescheder et al., "Which Training Methods for GANs do
    actually Converge?", ICML 2018, section 4.1.
    """
    made = GENERATOR.apply({"params": constants}, batch["noise"])
    real, slopes = jax.vjp(lambda x: model(x)[:, 0], batch["point"])
    steepness = jnp.square(slopes(jnp.ones_like(real))[0]).sum(-1)
    return nn.softplus(-real) + nn.softplus(model(made)[:, 0]) + 0.1 * steepness


def make(model, batch):
    return model(batch["noise"])


def draw(rng, num_rows=NUM_ROWS):
    """A batch: noise, and points around eight places on a circle."""
    angle = rng.integers(NUM_BLOBS, size=num_rows) * 2 * np.pi / NUM_BLOBS
    point = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.05 * rng.normal(size=(num_rows, 2))
    noise = rng.normal(size=(num_rows, NUM_NOISE))
    return {"noise": noise.astype(np.float32), "point": point.astype(np.float32)}


def energy_distance(x, y):
    """Twice the mean distance between two samples, less that within each; zero if equal."""

    def mean_distance(x, y):
        return np.linalg.norm(x[:, None] - y, axis=-1).mean()

    return 2 * mean_distance(x, y) - mean_distance(x, x) - mean_distance(y, y)


def main(num_steps=1000):
    """Trains both; returns the points generated at the end, and the distances during training."""
    rng, judged = np.random.default_rng(0), draw(np.random.default_rng(1))
    makes = jddp.DataParallel(GENERATOR, optax.adam(1e-3, b1=0.5), generator_loss, ema_decay=0.99)
    judges = jddp.DataParallel(CRITIC, optax.adam(2e-3, b1=0.5), critic_loss)
    g = makes.init(0, params=GENERATOR.init(jax.random.key(0), judged["noise"]))
    d = judges.init(1, params=CRITIC.init(jax.random.key(1), judged["point"]))
    distances = []
    for i in range(num_steps + 1):
        if i % (num_steps // 5) == 0:  # The EMA of the generator is less noisy than the last one.
            made = makes.predict(g, [judged], make, "ema")
            distances.append(energy_distance(made, judged["point"]))
            print(f"step {i:4}: distance {distances[-1]:.4f}")
        d, lost = judges.step(d, draw(rng), constants=g.params)
        g, metrics = makes.step(g, draw(rng), constants=d.params)
    print(f"loss of the critic {lost['loss']:.3f}, of the generator {metrics['loss']:.3f}")
    return made, distances


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
