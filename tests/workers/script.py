"""A user's own script, which joins through jddp, and whose last process comes to a sudden end."""

import itertools
import sys

import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed

distributed.initialize(distributed.resolve_identity())

import jax  # noqa: E402

WHAT, WHERE = sys.argv[1:]
IS_LAST = jax.process_index() == jax.process_count() - 1
ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)


def end(at):
    """What happens to the last process at one place, in the fifth step."""
    if IS_LAST and at == WHERE:
        if WHAT == "raise":
            raise RuntimeError("a bug of mine")
        if WHAT == "refuse":
            raise jddp.DataError("my data are bad")
        if WHAT == "exit":
            sys.exit(3)


def batches():
    for i in itertools.count():
        if i == 4:
            end("iterator")
        yield make_batch(8, seed=jax.process_index())


class Callback(jddp.Callback):
    def on_step(self, run, metrics):
        if metrics["step"] == 4:
            end("callback")


if WHERE == "loop":
    state = ddp.init(0, make_batch(8))
    num_batches = 4 if WHAT == "stop" and IS_LAST else 20
    for i in range(num_batches):
        if i == 4:
            end("loop")
        state, metrics = ddp.step(state, make_batch(8))
    print("the loss is", float(metrics["loss"]))
else:
    jddp.fit(ddp, batches(), num_steps=20, callbacks=[Callback()])
