"""What a step sends on TPUs that are only described, as libtpu compiles it: nothing is run.

    JAX_PLATFORMS=cpu "$(scripts/venv aot)" benchmarks/tpus.py
    JAX_PLATFORMS=cpu "$(scripts/venv aot)" benchmarks/tpus.py --only v5e --strategies fsdp

For each slice and strategy: the large collectives of the compiled program, the bytes that a ring of
them moves out of a device over the bytes of the ideal collectives, and the memory of the step.
"""

import argparse
from collections import Counter

import numpy as np
import optax
from flax import linen as nn

import jddp

SLICES = {"v4": "2x2x1", "v5e": "2x4", "v5p": "2x2x1", "v6e": "2x4"}
LARGE = 4096  # Bytes; sums, counts and parameters of one tile are smaller.
# Bytes that a ring of n devices moves out of each, over the bytes of the whole array.
SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
IDEAL = {"ddp": 2, "zero1": 2, "fsdp": 3}  # In arrays of all parameters, as above.


class Net(nn.Module):
    """Eight dense layers: 8.4 million parameters."""

    @nn.compact
    def __call__(self, x):
        """Returns logits (b, 10)."""
        for _ in range(8):
            x = nn.relu(nn.Dense(1024)(x))
        return nn.Dense(10)(x)


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def main() -> None:
    """Prints one row for each slice and strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*SLICES], choices=SLICES)
    parser.add_argument("--strategies", nargs="+", default=[*IDEAL], choices=IDEAL)
    arguments = parser.parse_args()
    batch = {"x": np.zeros((512, 1024), np.float32), "y": np.zeros(512, np.int32)}
    print("| slice | strategy | collectives | async | bytes / ideal | GiB |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for name in arguments.only:
        for strategy in arguments.strategies:
            ddp = jddp.DataParallel(Net(), optax.adamw(1e-3), loss_fn, mesh=1, strategy=strategy)
            found = jddp.explain(ddp, batch, target=name, topology=SLICES[name])
            large = [x for x in found.compiled if x.bytes > LARGE]
            ops = ", ".join(
                f"{num} {op}" for op, num in sorted(Counter(x.op for x in large).items())
            )
            size = 4 * (8 * (1024 * 1024 + 1024) + 10 * 1024 + 10)
            sent = sum(SENT.get(x.op, 1) * x.bytes for x in large) / (IDEAL[strategy] * size)
            overlapped = sum(x.is_async for x in large)
            gib = found.prediction.memory.total / 2**30
            row = [f"{name} {SLICES[name]}", strategy, ops, overlapped, f"{sent:.2f}", f"{gib:.2f}"]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
