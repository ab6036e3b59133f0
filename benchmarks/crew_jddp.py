"""One process of a crew that trains with `jddp.DataParallel`; see `crew`."""

import time
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from crew import Turn, serve
from jobs import JOBS

import jddp
from jddp import distributed
from jddp.zoo.models import GPT, MLP
from jddp.zoo.models.resnet import BasicBlock, ResNet
from jddp.zoo.tiles import tiled_cross_entropy

MODELS = {
    "mlp": lambda sizes: MLP(sizes[1:-1], sizes[-1]),
    "gpt": GPT,
    "resnet": lambda: ResNet((1, 1, 1), BasicBlock, width=32, num_classes=10, stem="cifar"),
}


def loss_fn(model: Any, batch: Any, train: bool) -> jax.Array:
    logits = model(batch["inputs"], train=train)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])


def loss_in_tiles(model: Any, batch: Any, train: bool) -> Any:
    head = partial(tiled_cross_entropy, labels=batch["targets"], train=train, tile_size=512)
    return model(batch["inputs"], train=train, loss_head=head)[0]


def data_parallel(job: str, tiles: bool = False, **options: Any) -> jddp.DataParallel:
    model = MODELS[JOBS[job].model](**JOBS[job].sizes)
    loss = loss_in_tiles if tiles else loss_fn
    return jddp.DataParallel(model, optax.sgd(0.01, momentum=0.9), loss, **options)


def make_turn(job: str, copy: int = 0, **options: Any) -> Turn:
    """Returns turns of a contender; a `copy` of another number is compiled again."""
    del copy
    ddp = data_parallel(job, **options)
    batch = {
        name: np.split(x, jax.process_count())[jax.process_index()]
        for name, x in JOBS[job].batch().items()
    }
    state = ddp.init(seed=0, batch=batch)
    batch = ddp.shard_batch(batch)

    def turn(num_steps: int) -> float:
        nonlocal state
        started, waiting = time.perf_counter(), None
        for _ in range(num_steps):
            state, metrics = ddp.step(state, batch)
            jax.block_until_ready(waiting)
            waiting = metrics["loss"]
        jax.block_until_ready(state)
        return time.perf_counter() - started

    turn(3)
    return turn


if __name__ == "__main__":
    distributed.initialize(distributed.resolve_identity())
    serve(make_turn)
