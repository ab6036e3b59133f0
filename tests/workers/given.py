"""One process of a job that is given what the others are not, or the rows that they have too."""

import numpy as np
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed
from jddp.data import Order, TrainBatches, eval_batches

distributed.initialize(distributed.resolve_identity())

import jax  # noqa: E402

ME = jax.process_index()
ROWS, TEST = make_batch(64), make_batch(30, seed=1)
ALL = {"process_index": 0, "num_processes": 1}  # as on one process
ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)


def batches(seed=0, rows=64, **options):
    part, order = {name: x[:rows] for name, x in ROWS.items()}, Order(rows, seed)
    return TrainBatches(part, global_batch_size=8, order=order, **options)


class Steps(jddp.Callback):
    def on_step(self, run, metrics):
        print("a step was taken", flush=True)


def fit(given, num_steps=2, **options):
    try:
        return jddp.fit(ddp, given, num_steps=num_steps, **{"callbacks": [Steps()], **options})
    except jddp.Error as error:
        print(error.exit_code, error, flush=True)


fit(batches(), num_steps=20 + 10 * ME)
fit(batches(), seed=ME)
fit(batches(), evaluate=eval_batches(TEST, global_batch_size=8) if ME else None)
fit(batches(seed=ME))
fit(batches(rows=64 - 8 * ME))
fit([make_batch(4, seed=ME)] * (1 + ME))
fit(batches(**ALL))
fit(batches(), evaluate=eval_batches(TEST, global_batch_size=8, **ALL))
fit([make_batch(4)] * 4, checks=jddp.Checks(same_batches=True), callbacks=[])
constant = {name: np.repeat(x[:1], 4, 0) for name, x in make_batch(1).items()}
fit([constant] * 4, callbacks=[])
print("the end", flush=True)
