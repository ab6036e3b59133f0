"""What `explain` and `stats` tell is what was planned, compiled and run."""

import re

import jax
import optax
import pytest
from compiled import collectives
from tiny import MLP, ConvNet, loss_fn, make_batch

import jddp
from jddp.inspection.collectives import collectives as read_collectives
from jddp.inspection.hlo import read_program

KIB = 1 / 1024


def wrapped(model=None, **options):
    return jddp.DataParallel(model or MLP(), optax.adam(1e-3), loss_fn, **options)


def test_an_explanation_counts_what_the_compiled_step_sends():
    ddp = wrapped(ConvNet(), bucket_mb=0.1 * KIB, layout="flat")
    told = ddp.explain(make_batch())
    program = ddp.lower(make_batch()).compile().as_text()
    found = [(x.op, x.num_elements) for x in told.compiled]
    assert found == collectives(program)
    rows = [line.split() for line in str(told).splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["gradients"]] == [str(len(ddp.plan))]
    assert [row[0] for row in rows if row[-2:] == ["and", "metrics"]] == ["1"]
    assert [row[0] for row in rows if "model," in row] == ["1", "1"]  # batch norm, either way


@pytest.mark.parametrize("overlap", [False, True])
def test_neither_rows_nor_micro_batches_change_the_gradients_that_are_sent(overlap):
    asked = [
        gradients_asked_for(wrapped(overlap=overlap, accumulate_steps=parts), rows)
        for parts, rows in ((1, 16), (1, 32), (2, 32))
    ]
    assert asked[0]
    assert asked[0] == asked[1] == asked[2]


def gradients_asked_for(ddp, rows):
    """Dtypes and bytes of the gradient collectives in the lowered step."""
    lowered = ddp.lower(jax.eval_shape(lambda: make_batch(rows)))
    found = read_collectives(read_program(lowered.as_text("hlo", debug_info=True)))
    return sorted((x.dtypes, x.bytes) for x in found if re.search(r"bucket_\d+/", x.op_name))


def test_an_explanation_fits_a_terminal_of_80_columns_and_a_notebook():
    told = wrapped(ConvNet(), wire_dtype="bfloat16").explain(make_batch())
    assert max(map(len, str(told).splitlines())) <= 80
    assert told._repr_html_().startswith("<pre")


def test_stats_need_a_plan():
    with pytest.raises(jddp.Error, match="Call init first"):
        wrapped().stats()


def test_stats_are_those_of_the_plan_and_of_the_calls():
    ddp, batch = wrapped(bucket_mb=0.1 * KIB, layout="flat"), make_batch()
    state = ddp.init(0, batch)
    told = ddp.stats()
    assert told["num_buckets_reduced"] == len(ddp.plan) == 4
    assert told["bucket_sizes"] == [bucket.bytes for bucket in ddp.plan.buckets]
    assert told["wire_bytes"] == ddp.plan.wire_bytes == sum(told["bucket_sizes"])
    assert told["num_parameter_tensors"] == 4
    assert (told["world_size"], told["rank"], told["backend_name"]) == (8, 0, "cpu")
    assert (told["iteration"], told["avg_step_seconds"]) == (0, None)
    for _ in range(3):
        state, _ = ddp.step(state, batch)
    told = ddp.stats()
    assert told["iteration"] == 3
    assert told["avg_step_seconds"] > 0


def test_stats_of_rows_count_collectives_and_time_the_reduction():
    ddp, batch = wrapped(bucket_mb=0.1 * KIB, layout="flat"), make_batch()
    ddp.init(0, batch)
    told = ddp.stats(batch)
    assert told["num_collectives"] == len(ddp.plan) + 1
    assert told["reduce_seconds"] > 0


@pytest.mark.parametrize(
    "options, name", [({}, ""), ({"comm_hook": jddp.CommHook(lambda plan: (), max)}, "max")]
)
def test_stats_name_the_hook(options, name):
    """HK-8."""
    ddp = wrapped(**options)
    ddp.init(0, make_batch())
    assert ddp.stats()["comm_hook"] == name
    # The plan's bytes are those before a hook: it says so.
    assert ("comm_hook 'max'" in str(ddp.plan)) == (name == "max")
