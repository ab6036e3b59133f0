"""Reinforcement learning (actor-critic): each replica steps its own environments.

    python examples/reinforce.py

An environment is a cart with a pole on it, on the device of its replica: environments are rows that
stay on their device, with random numbers from the replica's key. Each round steps all environments
for some time, and takes one step of advantage actor-critic (Mnih et al., "Asynchronous Methods for
Deep Reinforcement Learning", ICML 2016, section 4.3) on these transitions.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jddp

WORLDS_PER_REPLICA, TICKS_PER_ROUND, LONGEST, DISCOUNT = 16, 32, 200, 0.97


class Player(nn.Module):
    """Policy and value: logits of the two pushes, and how long the pole will stand."""

    @nn.compact
    def __call__(self, seen):
        """Returns logits (..., 2) and values (...) for what is seen, (..., 4)."""
        hidden = nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(seen))))
        return nn.Dense(2)(hidden), nn.Dense(1)(hidden)[..., 0]


def advance(body, push_right):
    """Moves cart and pole by a fiftieth of a second; also returns whether they have failed.

    Barto, Sutton and Anderson, "Neuronlike adaptive elements ...", 1983, without friction.
    """
    place, speed, angle, spin = body
    force = jnp.where(push_right, 10.0, -10.0)
    thrust = (force + 0.05 * spin**2 * jnp.sin(angle)) / 1.1
    turn = 9.8 * jnp.sin(angle) - jnp.cos(angle) * thrust
    turn /= 0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    pull = thrust - 0.05 * turn * jnp.cos(angle) / 1.1
    body += 0.02 * jnp.array([speed, pull, spin, turn])
    return body, (abs(place) > 2.4) | (abs(angle) > 0.21)


def begin(key):
    """An environment in which the pole is almost upright."""
    return {"body": jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), "age": jnp.int32(0)}


def live(player, world, key):
    """Steps one environment for a round; returns it, and a row to learn from."""

    def tick(world, key):
        key, fresh = jax.random.split(key)
        push = jax.random.categorical(key, player(world["body"])[0])
        body, failed = advance(world["body"], push)
        after = {"body": body, "age": world["age"] + 1}
        over = failed | (after["age"] >= LONGEST)
        transition = {"seen": world["body"], "push": push, "over": over, "age": after["age"]}
        return jax.tree.map(lambda x, y: jnp.where(over, x, y), begin(fresh), after), transition

    def look_back(value, over):
        value = 1 - DISCOUNT + DISCOUNT * jnp.where(over, 0.0, value)
        return value, value

    world, seen = jax.lax.scan(tick, world, jax.random.split(key, TICKS_PER_ROUND))
    last = player(world["body"])[1]
    return world, seen | {"value": jax.lax.scan(look_back, last, seen["over"], reverse=True)[1]}


def split(keys):
    """Keys of environments, from keys of replicas; each stays on its device."""
    return jax.vmap(lambda key: jax.random.split(key, WORLDS_PER_REPLICA))(keys).reshape(-1)


def make_worlds(keys):
    return jax.vmap(begin)(split(keys))


@jax.jit
def play(params, worlds, keys):
    player = functools.partial(Player().apply, {"params": params})
    return jax.vmap(functools.partial(live, player))(worlds, split(keys))


def loss_fn(model, batch):
    """The policy gradient loss with the advantage, and the squared error of the value."""
    logits, value = model(batch["seen"])
    gain = batch["value"] - value
    surprise = optax.softmax_cross_entropy_with_integer_labels(logits, batch["push"])
    losses = jax.lax.stop_gradient(gain) * surprise + 0.5 * gain**2
    return losses, {"ends": batch["over"], "ages": batch["over"] * batch["age"]}


def main(num_rounds=200):
    """Trains; returns the environments, and the mean age at which poles fell, by round."""
    ddp, ages = jddp.DataParallel(Player(), optax.adam(1e-3), loss_fn), []
    state = ddp.init(seed=0, params=Player().init(jax.random.key(0), jnp.zeros(4)))
    keys = jddp.replica_key(state, "first worlds")
    worlds = jax.jit(make_worlds, out_shardings=keys.sharding)(keys)
    for i in range(1, num_rounds + 1):
        worlds, rows = play(state.params, worlds, jddp.replica_key(state, "environment"))
        state, metrics = ddp.step(state, rows)
        if i % 25 == 0:
            ages.append(float(metrics["ages"] / metrics["ends"]))
            print(f"round {i:3}: poles stand {ages[-1]:5.1f} ticks, loss {metrics['loss']:.4f}")
    return worlds, ages


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
