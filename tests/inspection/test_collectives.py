"""What is really communicated, read from the compiled program."""

import jax
import pytest
from compiled import collectives
from flax import nnx
from tiny import MLP, ConvNet, NnxConvNet, make_batch, wrapped

import jddp
from jddp.inspection.collectives import is_backward

KIB = 1 / 1024


def step_collectives(model, **options):
    ddp, batch = wrapped(model, mesh=None, **options), make_batch()
    text = ddp.steps.lower(batch).compile().as_text()
    return ddp.steps.planned(batch).plan, collectives(text)


@pytest.mark.parametrize("bucket_mb", [0.1 * KIB, 0.5 * KIB, 25])
def test_flat_buckets_survive_compilation_and_one_small_vector_travels_beside_them(bucket_mb):
    leaf, flat = (jddp.Reduction(bucket_mb=bucket_mb, layout=x) for x in ("leaf", "flat"))
    plan, found = step_collectives(MLP(), reduction=flat)
    assert {op for op, _ in found} == {"all-reduce"}
    sizes = sorted(size for _, size in found)
    small = 4  # loss and accuracy, each a total and a count
    assert sizes == sorted([small, *(bucket.size for bucket in plan.buckets)])
    assert len(plan) == {0.1 * KIB: 4, 0.5 * KIB: 2, 25: 1}[bucket_mb]
    # XLA:CPU makes one collective of all leaves, the small vector included.
    _, found = step_collectives(MLP(), reduction=leaf)
    assert [size for _, size in found] == [sum(sizes)]


@pytest.mark.parametrize("model", [ConvNet(), NnxConvNet(nnx.Rngs(0))], ids=["linen", "nnx"])
def test_synced_batch_norm_adds_one_collective_a_direction_and_local_none(model):
    for batch_norm, num in (("sync", 2), ("local", 0)):
        options = {"reduction": jddp.Reduction(layout="flat"), "batch_norm": batch_norm}
        plan, found = step_collectives(model, **options)
        assert len(found) == len(plan) + 1 + num


def test_evaluation_sends_one_small_vector_and_making_the_state_nothing():
    ddp, batch = wrapped(ConvNet(), mesh=None), make_batch()
    state = ddp.init(0, batch)
    rows, valid = ddp.shard_batch((batch, batch["x"][:, 0]))
    values = state.params, state.model_state
    lowered = ddp._evaluate.lower(state.key, values, 0, ddp.steps.inputs(rows), valid)
    assert collectives(lowered.compile().as_text()) == [("all-reduce", 6)]
    example = ddp.steps.inputs(jax.tree.map(lambda x: x[:2], batch))
    assert collectives(ddp.steps.init.lower(0, example, None, None).compile().as_text()) == []


def test_operations_of_the_backward_pass_are_known_by_their_names():
    for name in ("transpose(jvp(loss))/model/dot", "loss/model/dot"):  # the second of newer JAX
        assert is_backward(f"jit(step)/shard_map/{name}")
    for name in ("jvp(jit(run_and_settle))/loss/model/dot", "optimizer_update/mul"):
        assert not is_backward(f"jit(step)/shard_map/{name}")
