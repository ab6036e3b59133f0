"""Weight noise per replica: each trains with the common weights plus its own noise.

    python examples/perturbed_weights.py

Each replica uses its own random key for the noise, and computes the gradient there. The mean of all
is a gradient of the loss smoothed over the neighbourhood of the weights, as in evolution
strategies; so the result is robust: weights that are perturbed later, or rounded, still work.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jddp
from jddp.data import TrainBatches, eval_batches, make_source


class Mlp(nn.Module):
    """One hidden layer."""

    @nn.compact
    def __call__(self, x):
        """Returns logits (b, 10) for images."""
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


def moved(tree, key, noise):
    """The tree plus normal noise of that standard deviation."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    moves = [noise * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return treedef.unflatten([x + move for x, move in zip(leaves, moves, strict=True)])


def loss_fn(model, batch, train, constants):
    """The cross entropy; in training with the noisy weights of this replica."""
    metrics = {}
    if train and not model.is_initializing():
        key = model.make_rng("noise")  # By step and replica, and reproducible.
        module, variables = model.unbind()
        variables = moved(variables, key, constants["noise"])
        model = module.bind(variables)
        seen = jddp.all_gather(variables["params"]["Dense_0"]["kernel"][None])
        metrics["spread"] = seen.std(axis=0).mean()
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, metrics | {"accuracy": logits.argmax(-1) == batch["label"]}


def main(num_steps=300, noises=(0.0, 0.1)):
    """Trains with and without noise; returns for each the spread, and the accuracies."""
    data, ends = make_source("fashion_mnist").load(), []
    test_batches = eval_batches(data.test, global_batch_size=2000)
    wrapped = jddp.DataParallel(Mlp(), optax.adam(1e-3), loss_fn)
    for noise in noises:
        ddp = wrapped.with_constants({"noise": jnp.float32(noise)})  # compiles once
        batches = TrainBatches(data.train, global_batch_size=256, seed=0)
        state = ddp.init(seed=0, batch=batches.batch(0))
        for _ in range(num_steps):
            state, metrics = ddp.step(state, next(batches))
        ends.append({"spread": float(metrics["spread"])})
        print(
            f"noise {noise}: loss {metrics['loss']:.3f}; "
            f"weights differ by {metrics['spread']:.3f} among the replicas"
        )
        for later in (0.0, 0.1):
            params = moved(state.params, jax.random.key(1), later)
            accuracy = ddp.evaluate(state.replace(params=params), test_batches)["accuracy"]
            ends[-1][later] = accuracy
            print(f"  test accuracy with weights moved by {later}: {accuracy:.3f}")
    return ends


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
