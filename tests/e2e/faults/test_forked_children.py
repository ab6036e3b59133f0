"""Child processes that a callback or the data fork: their signals and errors stay their own."""

import json
import signal
import subprocess
import sys

import pytest
from runs import environment

pytestmark = pytest.mark.processes

# JAX warns of each fork, since a child that used it could hang: these do not.
PROGRAM = """
import json, multiprocessing, sys, time, warnings
warnings.filterwarnings("ignore", ".*fork.*")
import jax, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 2)
import jddp
from jddp.distributed.failure import owned_process
from jddp.zoo.losses import cross_entropy
from jddp.zoo.models import MLP

forks, codes, where = multiprocessing.get_context("fork"), [], sys.argv[1]


def terminated(target, *given):
    child = forks.Process(target=target, args=given)
    child.start()
    child.terminate()
    child.join(60)
    codes.append(child.exitcode)


def fork():
    terminated(time.sleep, 1000)
    with forks.Pool(2) as pool:  # which terminates its processes
        codes.append(sum(pool.map(abs, [-1, -2])))
    child = forks.Process(target=sys.exit, args=(5,))
    child.start()
    child.join()
    codes.append(child.exitcode)


class Forking(jddp.Callback):
    def on_step(self, run, metrics):
        if where == "callback" and metrics["step"] == 2:
            fork()


def batches():
    batch = {"image": np.ones((8, 2), np.float32), "label": np.zeros(8, np.int32)}
    while True:
        yield batch
        if where == "data" and not codes:
            fork()


ddp = jddp.DataParallel(MLP(widths=(3,)), optax.sgd(0.1), cross_entropy)
with owned_process():
    run = jddp.fit(ddp, batches(), num_steps=6, run_dir=sys.argv[2], callbacks=[Forking()])
print(json.dumps({"step": run.step, "interrupted": run.interrupted, "codes": codes}))
"""


@pytest.mark.parametrize("where", ["callback", "data"])
def test_children_that_are_forked_end_alone(tmp_path, where):
    command = [sys.executable, "-c", PROGRAM, where, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    want = {"step": 6, "interrupted": None, "codes": [-signal.SIGTERM, 3, 5]}
    assert json.loads(done.stdout.splitlines()[-1]) == want, done.stderr
    assert "called sys.exit" not in done.stderr
