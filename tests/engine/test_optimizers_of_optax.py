"""Every public optimizer of optax with each strategy: that of one device, or refused in words."""

import runpy
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from judge import Net, assert_close, host, make_rows, start, wrapped
from sweeps import swept
from tiny import take_steps

from jddp.ground.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Made of the namespace of optax: a new optimizer fails here until it has arguments there.
OF_OPTAX = runpy.run_path(str(ROOT / "docs" / "optimizers.py"))
OPTIMIZERS = OF_OPTAX["optimizers"]()
NEEDS_MORE = "refused, with `ddp` too"
# Sums of two replicas in another order; Adam and its kin divide by roots of what is small.
ROUNDING = 2e-5
CASES = [(name, strategy) for name in OPTIMIZERS for strategy in ("ddp", "zero1", "fsdp")]


def of_one_device(tx, params, batches):
    """Parameters after steps on whole batches, with optax and Flax alone."""

    def loss(params, batch):
        return ((Net().apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = update(grads, opt_state, params, value)
        return optax.apply_updates(params, updates), opt_state

    def update(*given):
        if tx.update.__qualname__.startswith("sam."):  # takes no loss, whatever its type says
            return tx.update(*given[:3])
        return optax.with_extra_args_support(tx).update(*given[:3], value=given[3])

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params


@pytest.mark.parametrize(("name", "strategy"), swept(CASES, every=61))
def test_an_optimizer_of_optax_is_that_of_one_device_or_refused(name, strategy):
    tx, batches = OPTIMIZERS[name], [make_rows(seed=i) for i in range(3)]
    ddp = wrapped(Net(), optimizer=tx, strategy=strategy, mesh=2)
    with jax.numpy_rank_promotion("allow"):
        outcome = OF_OPTAX["outcome"](tx)
        if outcome.startswith(NEEDS_MORE):
            with pytest.raises(ConfigError, match="average_gradients|LocalSteps"):
                start(ddp, batches[0])
            return
        state = start(ddp, batches[0])
        # A copy of its own: a step takes the arrays of the state.
        params = jax.tree.map(np.copy, host(state.params))
        want = of_one_device(tx, params, batches)
        state, _ = take_steps(ddp, batches, state)
        assert_close(host(state.params), host(want), rtol=ROUNDING)


def test_a_step_gives_no_loss_to_an_optimizer_that_does_not_take_it():
    assert OF_OPTAX["outcome"](OPTIMIZERS["contrib.sam"]) == "its shard of each parameter"
    inside = optax.chain(OPTIMIZERS["contrib.sam"], optax.scale(0.5))
    assert OF_OPTAX["outcome"](inside) == "its shard of each parameter"


@pytest.mark.parametrize("name", ["lbfgs", "contrib.sophia", "contrib.dpsgd", "monitor"])
def test_an_optimizer_that_needs_more_than_a_step_has_is_refused_in_one_line(name):
    with pytest.raises(ConfigError, match=r"the loss: .*average_gradients") as error:
        start(wrapped(Net(), optimizer=OPTIMIZERS[name], mesh=2), make_rows())
    assert len(str(error.value).splitlines()) == 1
