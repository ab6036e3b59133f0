"""Parameters that are not trained: no gradient, no bytes on the wire, no optimizer state."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from judge import Net, make_rows, squares, wrapped
from sweeps import swept
from tiny import ConvNet, NnxConvNet, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.reader import read_newest


def test_frozen_parameters_are_neither_sent_nor_in_the_optimizer_state():
    ddp, full = (wrapped(Net(), frozen=patterns) for patterns in (["first/.*"], []))
    shapes, whole = (x.steps.abstract_state(make_rows()) for x in (ddp, full))
    num_frozen = sum(x.size for x in jax.tree.leaves(whole.params["first"]))
    plans = [x.steps.planned(make_rows()).plan for x in (full, ddp)]
    assert plans[0].wire_bytes - plans[1].wire_bytes == 4 * num_frozen
    momentum = [sum(x.size for x in jax.tree.leaves(s.opt_state)) for s in (whole, shapes)]
    assert momentum[0] - momentum[1] == num_frozen
    assert "2 frozen leaves, 7.63e-05 MiB: neither trained nor sent" in str(plans[1])


@pytest.mark.parametrize(
    "model", swept([ConvNet(), NnxConvNet(nnx.Rngs(0))], every=2), ids=["linen", "nnx"]
)
@pytest.mark.parametrize("batch_norm", swept(["sync", "local"], every=2))
def test_a_run_with_frozen_parameters_is_read_as_that_of_a_whole_model(tmp_path, model, batch_norm):
    """Kept, opened, evaluated by its moving average, and continued with all parameters."""
    batch, options = make_batch(), {"mesh": 2, "batch_norm": batch_norm}
    frozen = {"frozen": lambda path: "kernel" in path, "ema_decay": 0.5}
    ddp = jddp.DataParallel(model, optax.adam(0.1), loss_fn, **frozen, **options)
    run = jddp.fit(
        ddp, [batch] * 2, num_steps=2, evaluate=jddp.Evaluation([batch], "ema"), run_dir=tmp_path
    )
    opened = jddp.open_run(tmp_path, model=model, loss_fn=loss_fn, mesh=2)
    assert opened.evaluate([batch]) == run.evaluate([batch])
    saved = read_newest(tmp_path / "checkpoints", ["params", "model_state"])
    assert "params" not in saved["model_state"]
    released = jddp.DataParallel(model, optax.sgd(0.1), loss_fn, **options)
    state = released.init(0, batch, params=tmp_path)
    assert released.evaluate(state, [batch]) == ddp.evaluate(run.state, [batch])
    before = flatten_dict(jax.device_get(state.params))  # the step takes the state
    after = flatten_dict(take_steps(released, [batch], state)[0].params)
    assert not any(np.array_equal(x, after[path]) for path, x in before.items() if x.ndim > 1)


BAD = {
    "misspelt": (["frist/.*"], r"'frist/\.\*' matches no .*nearest are 'first/bias', 'first/k"),
    "a part of a path": (["first"], "'first' matches no whole path"),
    "no expression": (["(first"], "no regular expression: missing"),
    "all": (".*", "it matches all parameters"),
    "none": (lambda path: False, "it matches none"),
}


@pytest.mark.parametrize("frozen, message", BAD.values(), ids=BAD)
def test_patterns_that_match_nothing_or_everything_are_refused(frozen, message):
    with pytest.raises(jddp.ConfigError, match=message):
        wrapped(Net(), frozen=frozen).init(0, make_rows())


def test_verify_finds_eight_devices_equal_to_one_with_frozen_parameters():
    report = jddp.verify(Net(), optax.sgd(0.1), squares, make_rows(), frozen=["first/.*"])
    assert report.passed, report
