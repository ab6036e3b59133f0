"""Every pair of options equals one device, or is refused by the table of refused pairs."""

import inspect
import itertools

import optax
import pytest
from judge import joined
from sweeps import swept
from test_random_options import MIB, Case, Net, halves, hold, make_loss

import jddp
from jddp.engine.strategy import REFUSED

# An option with a value that is not its default, and what makes that value possible at all.
VALUES = {
    "reduction.bucket_mb": {"reduction": jddp.Reduction(bucket_mb=40 / MIB)},
    "reduction.overlap=True": {"reduction": jddp.Reduction(overlap=True, layout="flat")},
    "reduction.wire_dtype": {"reduction": "bfloat16"},
    "reduction.hook": {"reduction": jddp.Reduction(hook=jddp.CommHook(lambda plan: (), halves))},
    "synced statistics": {"batch_norm": "sync"},
    "statistics of groups": {"batch_norm": jddp.SyncBatchNorm(group_size=2)},
    "local statistics": {"batch_norm": "local"},
    "broadcast statistics": {"batch_norm": "broadcast"},
    "state of replicas": {"state": {"counts": "per_replica"}},
    "sums of state": {"state": {"counts": "sum"}},
    "accumulate_steps": {"accumulate_steps": 2},
    "zero1": {"strategy": "zero1"},
    "logical replicas": {"strategy": jddp.LogicalReplicas(8)},
    "fsdp": {"strategy": "fsdp", "reduction": jddp.Reduction(layout="flat")},
    "fsdp in groups": {
        "strategy": jddp.FSDP(group_size=2),
        "reduction": jddp.Reduction(layout="flat"),
    },
    "local steps from the first": {"strategy": jddp.LocalSteps(2)},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "ema_decay": {"ema_decay": 0.5},
    "unused_parameters": {"unused_parameters": "skip"},
    "frozen": {"frozen": ["first/.*"]},
    "skip_nonfinite": {"skip_nonfinite": True},
    "loss_scale": {"precision": jddp.Precision(loss_scale="dynamic")},
}
DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(jddp.DataParallel).parameters.items()
    if option.default is not option.empty
} | {"mesh": 4, "reduction": jddp.Reduction(layout="leaf", overlap=False)}
STATISTICS = {name for name, options in VALUES.items() if "batch_norm" in options}
COUNTS = {name for name, options in VALUES.items() if "state" in options}
# Replicas run one after the other, or apart, cannot agree on what these have them agree on.
APART = {"logical replicas", "local steps from the first"}
TOGETHER = STATISTICS - {"local statistics"}
KINDS = {"local steps from the first": "local steps", "fsdp in groups": "fsdp"}
OF_NO_GROUP = {"local statistics", "broadcast statistics"}


def is_pair(first, second):
    """Whether both can be given: one option has one value, but a reduction has several."""
    return first.keys() & second.keys() <= {"reduction"}


PAIRS = [p for p in itertools.combinations(VALUES, 2) if is_pair(*map(VALUES.get, p))]


def hold_options(options, *, norm="layer", form="tokens", mask="no", optimizer="sgd", **how):
    """Holds options, beside which all are at their defaults, to one device."""
    model = Net(norm, attention=False, counts=False, unused=False)
    options = joined(DEFAULTS, options)
    case = Case(model, form, mask, optimizer, options["skip_nonfinite"], options)
    assert hold(case, **how) is None


def refused_by_table(pair):
    """The names in the table under which a pair is refused; None if it is not."""
    names = {KINDS.get(name, name) for name in pair} | {*pair}
    return next((x for x in REFUSED if names.issuperset(x)), None)


def is_refused(pair):
    is_apart = APART & set(pair) and TOGETHER & set(pair)
    is_divided = {"fsdp", "fsdp in groups"} & set(pair) and OF_NO_GROUP & set(pair)
    return bool(refused_by_table(pair) or is_apart or is_divided)


@pytest.mark.slow
@pytest.mark.parametrize("pair", swept([(pair,) for pair in PAIRS], every=3), ids="-".join)
def test_a_pair_of_options_equals_one_device_or_is_refused(pair):
    """Rows without a replica's valid ones, steps that are skipped, decay of what is unused."""
    chosen = set(pair)
    model = Net(
        norm="batch" if STATISTICS & chosen else "layer",
        attention=False,
        counts=bool(COUNTS & chosen),
        unused="unused_parameters" in pair,
    )
    options = joined(DEFAULTS, *map(VALUES.get, pair))
    mask = "empty" if {*OF_NO_GROUP, "local steps from the first"} & chosen else "row"
    optimizer = "adamw" if model.unused else "sgd"
    fails = bool({"skip_nonfinite", "loss_scale"} & chosen)
    refusal = hold(Case(model, "tokens", mask, optimizer, fails, options), evaluates=False)
    assert (refusal is not None) == is_refused(pair), refusal
    if names := refused_by_table(pair):
        assert f"{' and '.join(names)} cannot be combined" in refusal


NAMED = VALUES | {
    "reduction.overlap=True": {"reduction": jddp.Reduction(overlap=True)},
    "reduction.layout='leaf'": {"reduction": jddp.Reduction(layout="leaf")},
    "reduction.wire_dtype='float16'": {"reduction": "float16"},
    "batch_norm='local' or 'broadcast'": VALUES["local statistics"],
    "local steps": VALUES["local steps from the first"],
}


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_a_pair_of_the_table_is_refused_when_it_is_given(pair):
    model = Net("batch", attention=False, counts=False, unused=False)
    options = joined(*map(NAMED.get, pair))
    with pytest.raises(jddp.ConfigError, match=f"{' and '.join(pair)} cannot be combined: "):
        jddp.DataParallel(model, optax.sgd(0.1), make_loss("tokens"), **options, mesh=4)
