"""Processes exchange values between their hosts, as often as they like; no device takes part."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import run_job
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.distributed.coordination import awaiting, computing, is_waiting_for

NUM_ROUNDS = 50
SIZES = [[5, 3, 0, 2], [4, 0, 8, 1]]  # of evaluation batches, by process: of four devices each
SCRIPT = """
import json
import sys

from jddp.distributed import initialize, resolve_identity
from jddp.distributed.join import configure_devices

configure_devices(8, num_processes=2)
initialize(resolve_identity())

import jax
import optax
from jax.experimental import multihost_utils
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.distributed import coordination

num_rounds, sizes = json.loads(sys.argv[1])
me = jax.process_index()
found = []
for i in range(num_rounds):
    found.append(coordination.collect("test", f"{me}/{i}", timeout_seconds=100))
assert found == [[f"0/{i}", f"1/{i}"] for i in range(num_rounds)], found
coordination.gather("end", "", timeout_seconds=100)
kept = [name for name, _ in coordination._client().key_value_dir_get("jddp/test")]
assert {name.split("/")[2] for name in kept} == {str(num_rounds)}, kept

multihost_utils.process_allgather = None  # which devices compute
ddp, rows, at = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn), make_batch(23), 0
state, batches = ddp.init(0, make_batch(8)), []
for pair in zip(*sizes, strict=True):
    begin = at + sum(pair[:me])
    batches.append({name: x[begin : begin + pair[me]] for name, x in rows.items()})
    at += sum(pair)
padded = ddp.pad(batches[0])
print(json.dumps({**ddp.evaluate(state, batches), "padded": len(padded["mask"])}))
"""


@pytest.mark.processes
def test_evaluation_of_uneven_batches_is_exact_though_no_device_counts_rows():
    command = [sys.executable, "-c", SCRIPT, json.dumps([NUM_ROUNDS, SIZES])]
    ends = run_job(command, {}, {})
    first, second = (json.loads(said.splitlines()[-1]) for said, _ in ends)
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=jax.devices()[:1])
    want = ddp.evaluate(ddp.init(0, make_batch(8)), [make_batch(23)])
    assert first == second
    assert first.pop("padded") == 8
    assert first["examples"] == want["examples"] == 23
    assert first.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(first[name], want[name], rtol=1e-6)


def test_a_wait_is_seen_while_it_lasts_by_the_processes_that_it_is_for():
    assert not is_waiting_for({0, 1})
    with awaiting({1, 2}):
        assert is_waiting_for({0, 1})
        assert not is_waiting_for({0, 3})
    with computing({"x": jnp.ones(3), "name": 1}):  # whose devices are all of this process
        assert not is_waiting_for({0, 1})
    assert not is_waiting_for({1})
