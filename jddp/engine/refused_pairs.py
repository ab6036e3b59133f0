"""Pairs of options that cannot be combined, in one table.

They are refused by the names of options: the parts themselves know nothing of each other.
"""

from jddp.config.options import Reduction
from jddp.engine.strategy import StrategyParts
from jddp.errors import ConfigError

# Pairs of options that cannot be combined, and why.
REFUSED = {
    ("logical replicas", "reduction.hook"): "gradients are added in one order, which no hook keeps",
    ("logical replicas", "reduction.wire_dtype"): (
        "sums on the wire would round by the number of devices"
    ),
    ("logical replicas", "reduction.overlap=True"): (
        "gradients of several replicas are added before any is sent"
    ),
    ("local steps", "reduction.hook"): (
        "a hook reduces gradients in each step; see reduction.wire_dtype"
    ),
    ("local steps from the first", "reduction.overlap=True"): (
        "between outer steps no gradient is sent, beside which a backward pass could run"
    ),
    ("reduction.layout='leaf'", "reduction.overlap=True"): (
        "a bucket is waited for as a whole, and its leaves are reduced one by one"
    ),
}


def refuse_pairs(strategy: StrategyParts, reduction: Reduction) -> None:
    """Refuses options that cannot be combined.

    Raises:
      ConfigError: If a pair of them is given, with the reason.
    """
    given = {
        "logical replicas": strategy.num_logical is not None,
        "local steps": strategy.sync.every is not None,
        "local steps from the first": strategy.sync.every is not None and not strategy.sync.start,
        "reduction.hook": reduction.hook is not None,
        "reduction.wire_dtype": reduction.wire_dtype is not None,
        "reduction.overlap=True": reduction.overlap is True,
        "reduction.layout='leaf'": reduction.layout == "leaf",
    }
    for pair, why in REFUSED.items():
        if all(given[name] for name in pair):
            raise ConfigError(f"{' and '.join(pair)} cannot be combined: {why}. Leave one out.")
