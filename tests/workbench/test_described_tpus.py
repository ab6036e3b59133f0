"""Steps that are compiled for TPUs which are only described: what they send, and their memory."""

import json
import re

import numpy as np
import optax
import pytest
from flax import linen as nn

import jddp
from jddp.ground.errors import ConfigError
from jddp.workbench.described_tpus import described

SMALL = 4096  # Bytes of sums and counts, and of what fits into one tile.


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def explained(target, topology="2x4", **options):
    net = nn.Sequential([nn.Dense(width) for width in (192, 192, 192, 10)])
    batch = {"x": np.zeros((64, 100), np.float32), "y": np.zeros(64, np.int32)}
    ddp = jddp.DataParallel(net, optax.adamw(1e-3), loss_fn, mesh=2, **options)
    return jddp.explain(ddp, batch, target=target, topology=topology)


def large(explanation):
    return [x for x in explanation.compiled if x.bytes > SMALL]


@pytest.mark.aot
def test_a_fully_sharded_step_gathers_parameters_and_scatters_gradients_on_tpus():
    found = explained("v5e", strategy="fsdp")
    assert sorted({x.op for x in large(found)}) == ["all-gather", "reduce-scatter"]
    assert "Compiled for 8 x TPU v5 lite on 2 hosts" in str(found)
    assert json.dumps(found.as_json()["prediction"])


@pytest.mark.aot
def test_buckets_are_one_all_reduce_on_v5e_and_overlap_on_v6e():
    reduction = jddp.Reduction(bucket_mb=0.1)
    assert len(large(explained("v5e", reduction=reduction))) == 1
    assert explained("v6e", reduction=reduction).plan.notes[-1].startswith("overlap on")


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize(
    ("target", "topology"), [("v4", "2x2x1"), ("v5e", "2x4"), ("v5p", "2x2x1"), ("v6e", "2x4")]
)
def test_every_generation_compiles_every_strategy(target, topology, strategy):
    found = explained(target, topology, strategy=strategy)
    assert strategy == "ddp" or "all-gather" in {x.op for x in large(found)}
    assert found.prediction.memory.total > 0


def test_links_of_tpus_are_refused():
    with pytest.raises(ConfigError, match="--link"):
        described("v5e", "2x4", ["nic=25GB/s,14us"])


@pytest.mark.aot
def test_a_slice_that_is_none_is_refused_with_one_that_is():
    with pytest.raises(ConfigError, match=re.escape("--topology 2x2")):
        explained("v5e", "1x8")
