"""Every pair of options equals one device, or is refused by the table of refused pairs."""

import inspect
import itertools

import jax
import pytest
from test_random_options import MIB, Case, Net, halves, hold

import jddp
from jddp.engine.spec import REFUSED

# An option with a value that is not its default, and what makes that value possible at all.
VALUES = {
    "bucket_mb": {"bucket_mb": 40 / MIB},
    "overlap": {"overlap": True, "layout": "flat"},
    "wire_dtype": {"wire_dtype": "bfloat16"},
    "comm_hook": {"comm_hook": jddp.CommHook(lambda plan: (), halves)},
    "synced statistics": {"batch_norm": "sync"},
    "local statistics": {"batch_norm": "local"},
    "broadcast statistics": {"batch_norm": "broadcast"},
    "batch_norm_group_size": {"batch_norm_group_size": 2},
    "per_replica": {"per_replica": ("counts",)},
    "state_reduction": {"state_reduction": {"counts": "sum"}},
    "accumulate_steps": {"accumulate_steps": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "logical_replicas": {"logical_replicas": 8},
    "local_steps": {"local_steps": jddp.LocalSteps(2)},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "ema_decay": {"ema_decay": 0.5},
    "unused_parameters": {"unused_parameters": "skip"},
    "frozen": {"frozen": ["first/.*"]},
    "skip_nonfinite": {"skip_nonfinite": True},
    "loss_scale": {"loss_scale": "dynamic"},
}
DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(jddp.DataParallel).parameters.items()
    if option.default is not option.empty
} | {"mesh": 4, "layout": "leaf", "overlap": False}
MODES = {"synced statistics", "local statistics", "broadcast statistics"}
STATISTICS = {*MODES, "batch_norm_group_size"}
COUNTS = {"per_replica", "state_reduction"}
# Replicas run one after the other, or apart, cannot agree on what these have them agree on.
APART = {"logical_replicas", "local_steps"}
TOGETHER = STATISTICS - {"local statistics"}
# Statistics are those of a group only where they are synchronized.
OF_NO_GROUP = {"local statistics", "broadcast statistics"}
PAIRS = [
    p for p in itertools.combinations(VALUES, 2) if not any({*p} <= x for x in (MODES, COUNTS))
]


def hold_options(options, *, norm="layer", form="tokens", mask="no", optimizer="sgd", **how):
    """Holds options, beside which all are at their defaults, to one device."""
    model = Net(norm, attention=False, counts=False, unused=False)
    options = DEFAULTS | options
    case = Case(model, form, mask, optimizer, options["skip_nonfinite"], options)
    assert hold(case, **how) is None


def is_refused(pair):
    by_table = any(set(refused) == set(pair) for refused in REFUSED)
    is_apart = APART & set(pair) and TOGETHER & set(pair)
    is_grouped = "batch_norm_group_size" in pair and OF_NO_GROUP & set(pair)
    return bool(by_table or is_apart or is_grouped)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pair_of_options_equals_one_device_or_is_refused(pair):
    """Rows without a replica's valid ones, steps that are skipped, decay of what is unused."""
    chosen = set(pair)
    model = Net(
        norm="batch" if STATISTICS & chosen else "layer",
        attention=False,
        counts=bool(COUNTS & chosen),
        unused="unused_parameters" in pair,
    )
    options = DEFAULTS | VALUES[pair[0]] | VALUES[pair[1]]
    mask = "empty" if {*OF_NO_GROUP, "local_steps"} & chosen else "row"
    optimizer = "adamw" if model.unused else "sgd"
    fails = bool({"skip_nonfinite", "loss_scale"} & chosen)
    refusal = hold(Case(model, "tokens", mask, optimizer, fails, options), evaluates=False)
    assert (refusal is not None) == is_refused(pair), refusal
    if any(set(refused) == chosen for refused in REFUSED):
        assert "cannot be combined" in refusal
        assert all(name in refusal for name in pair)


def test_the_pairs_are_of_options_that_there_are():
    assert set().union(*VALUES.values()) <= set(DEFAULTS)
    assert {name for pair in REFUSED for name in pair} <= set(VALUES)
    assert jax.device_count() >= DEFAULTS["mesh"]
