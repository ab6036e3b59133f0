"""Data parallelism by hand with `jit(shard_map)`: the same step as `pmap_trainer`'s."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from peers.pmap_trainer import make_replica_step


def make_step(model, loss_and_accuracy, optimizer, mesh):
    step = jax.shard_map(
        make_replica_step(model, loss_and_accuracy, optimizer, "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(step, donate_argnums=0)


def replicate(tree, mesh):
    return jax.device_put(tree, NamedSharding(mesh, P()))


def shard(batch, mesh):
    return jax.device_put(batch, NamedSharding(mesh, P("data")))
