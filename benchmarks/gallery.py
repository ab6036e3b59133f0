"""Trains the models of tests/models/, which know nothing of replicas, with jddp and by hand.

    python benchmarks/gallery.py
    python benchmarks/gallery.py --only moe vae --rounds 50

    all-reduces  those that the compiled step of jddp runs
    ratio        ddp.step / jit(shard_map) by hand, as in step_time.py, with its `noise`

The step by hand averages gradients, losses, metrics and statistics with `lax.pmean`, so that it is
exact for equal shares only. It sends leaf by leaf, in one all-reduce of many arrays; jddp makes one
array of small leaves, and with `--packed` so does the step by hand. Its batch norms see the rows of
one replica, since the models name no axis; those of jddp see all: two all-reduces a layer.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax import P, lax
from jax.flatten_util import ravel_pytree
from step_time import Turn, compare, machine, stepping

import jddp

# step_time has put tests/ on the path.
from models import GALLERY, Example  # isort: skip
from oracle import mean_over_valid, with_metrics  # isort: skip

NUM_ROWS = 128
NUM_STEPS = 10  # in a turn
OPTIMIZER = optax.adamw(1e-3)

# Runs the loss: (params, kept, batch, key) -> (losses, metrics), kept.
Forward = Callable[..., tuple[tuple[Any, dict[str, Any]], Any]]


class State(NamedTuple):
    """What a step by hand carries; `kept` is all of the model but its parameters."""

    step: jax.Array
    params: Any
    kept: Any
    opt_state: Any
    key: jax.Array


def count_all_reduces(example: Example, batch: Any) -> int:
    ddp = jddp.DataParallel(example.model(), OPTIMIZER, example.loss_fn)
    found = [x for x in jddp.explain(ddp, batch).compiled if x.op == "all-reduce"]
    return sum(x.num_runs or 1 for x in found)


def by_jddp(example: Example, batch: Any) -> Turn:
    ddp = jddp.DataParallel(example.model(), OPTIMIZER, example.loss_fn)
    return stepping(ddp.step, ddp.init(0, batch), ddp.shard_batch(batch), NUM_STEPS)


def by_hand(example: Example, batch: Any, *, packed: bool) -> Turn:
    params, kept, forward = (linen if example.api == "Linen" else from_nnx)(example, batch)
    replica = make_replica_step(forward, packed_pmean if packed else lax.pmean)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    step = jax.jit(jax.shard_map(replica, **specs), donate_argnums=0)
    opt_state = OPTIMIZER.init(params)
    state = State(jnp.int32(0), params, kept, opt_state, jax.random.key(1))
    # Copied, for a step gives up each buffer once.
    state = jax.device_put(jax.tree.map(jnp.copy, state), jax.NamedSharding(mesh, P()))
    rows = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
    return stepping(step, state, rows, NUM_STEPS)


def make_replica_step(
    forward: Forward, pmean: Callable[[Any, str], Any]
) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    def replica(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        key = jax.random.fold_in(key, lax.axis_index("data"))

        def mean_loss(params: Any) -> Any:
            (losses, metrics), kept = forward(params, state.kept, batch, key)
            means = {
                name: mean_over_valid(jnp.asarray(x), batch.get("mask"))
                for name, x in {"loss": losses, **metrics}.items()
            }
            return means["loss"], (means, kept)

        grads, (means, kept) = jax.grad(mean_loss, has_aux=True)(state.params)
        grads, means = pmean((grads, means), "data")
        updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        kept = jax.tree.map(agree, state.kept, kept)
        return State(state.step + 1, params, kept, opt_state, state.key), means

    return replica


def packed_pmean(tree: Any, axis: str) -> Any:
    vector, unpack = ravel_pytree(tree)
    return unpack(lax.pmean(vector, axis))


def agree(old: jax.Array, new: jax.Array) -> jax.Array:
    """What a replica writes, made the same on all; keys stay, since each has folded its own."""
    if is_key(old):
        return old
    return lax.pmean(new, "data") if jnp.issubdtype(new.dtype, jnp.inexact) else new


def is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def linen(example: Example, batch: Any) -> tuple[Any, Any, Forward]:
    model, loss_fn = example.model(), with_metrics(example.loss_fn)
    kept = nn.init(lambda model: loss_fn(model, batch, True), model)(jax.random.key(0))
    params = kept.pop("params")

    def forward(params: Any, kept: Any, batch: Any, key: jax.Array) -> Any:
        run = nn.apply(lambda model: loss_fn(model, batch, True), model, mutable=list(kept))
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        return run({"params": params, **kept}, rngs=rngs)

    return params, kept, forward


def from_nnx(example: Example, batch: Any) -> tuple[Any, Any, Forward]:
    loss_fn = with_metrics(example.loss_fn)
    graph, params, kept = nnx.split(example.model(), nnx.Param, ...)

    def forward(params: Any, kept: Any, batch: Any, key: jax.Array) -> Any:
        number = jax.random.bits(key)

        def fold(x: jax.Array) -> jax.Array:
            folded = jax.vmap(jax.random.fold_in, (0, None))(x.reshape(-1), number)
            return folded.reshape(x.shape)

        own = jax.tree.map(lambda x: fold(x) if is_key(x) else x, kept)
        model = nnx.merge(graph, params, own)
        model.train()
        outputs = loss_fn(model, batch, True)
        return outputs, nnx.split(model, nnx.Param, ...)[2]

    return params, kept, forward


def measure(example: Example, num_rounds: int, *, packed: bool) -> dict[str, Any]:
    batch = example.make_batch(NUM_ROWS, 0)
    turns = (
        by_jddp(example, batch),
        by_hand(example, batch, packed=packed),
        by_hand(example, batch, packed=packed),
    )
    return {
        "api": example.api,
        "all_reduces": count_all_reduces(example, batch),
        **{key: round(value, 4) for key, value in compare(turns, num_rounds).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=GALLERY, default=list(GALLERY))
    parser.add_argument("--rounds", type=int, default=30, help="30 by default")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices; 8 by default")
    parser.add_argument("--packed", action="store_true", help="one array by hand too")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    results = {}
    print(
        f"{'':20} {'API':6} {'all-reduces':>11} "
        f"{'jddp':>9} {'by hand':>9} {'ratio':>7} {'noise':>7}"
    )
    for name in arguments.only:
        row = measure(GALLERY[name], arguments.rounds, packed=arguments.packed)
        results[name] = row
        print(
            f"{name:20} {row['api']:6} "
            f"{row['all_reduces']:11} {row['candidate_ms']:6.2f} ms {row['reference_ms']:6.2f} ms "
            f"{row['ratio']:7.3f} {row['noise']:7.3f}",
            flush=True,
        )
    print(json.dumps({**machine(), "rounds": arguments.rounds, "results": results}))


if __name__ == "__main__":
    main()
