"""On one, two and eight GPUs logical replicas add up in the same computations: compiled, not run.

No GPU is needed; `scripts/overlap` runs this with JAX's plugin for CUDA. A program is XLA's, and so
belongs to one version of JAX: the pinned one.
"""

import re
from collections import Counter

import jax
import numpy as np
import optax
import pytest

import jddp
from jddp.workbench.described import described_mesh
from jddp.zoo.losses import cross_entropy, next_token
from jddp.zoo.models import CNN, GPT

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("as_users_compile")]

IMAGES = {
    "image": jax.ShapeDtypeStruct((64, 28, 28, 1), np.float32),
    "label": jax.ShapeDtypeStruct((64,), np.int32),
}
TOKENS = {"tokens": jax.ShapeDtypeStruct((32, 65), np.int32)}
JOBS = {
    "cnn": (CNN(), cross_entropy, IMAGES),
    "gpt": (GPT(num_layers=2, num_heads=4, width=128, max_length=64), next_token, TOKENS),
}

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
# Libraries of NVIDIA, such as cuDNN and cuBLAS, are called by names with "__cu".
SUMS = re.compile(r' (reduce|reduce-window|dot|convolution|scatter)\(|custom_call_target="__cu')
UNREAD = re.compile(r", (metadata|frontend_attributes|sharding)=\{[^}]*\}|, backend_config=.*")


def canonical(text):
    """The text of instructions without what they are called and where they come from."""
    names = {}
    text = re.sub(r"to_apply=%?[\w.\-]+", "", UNREAD.sub("", text))
    return re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), text)


def computations_that_sum(text):
    """Kernels with a sum or maximum, whole; and calls of libraries, which have one."""
    fused = set(re.findall(r"calls=%?([\w.\-]+)", text))
    found = Counter()
    for name, body in COMPUTATION.findall(text):
        parts = [body] if name in fused else body.splitlines()
        found.update(canonical(part.strip()) for part in parts if SUMS.search(part))
    return found


@pytest.mark.parametrize("name", JOBS)
def test_all_computations_that_sum_are_the_same_on_one_two_and_eight_gpus(name):
    model, loss_fn, batch = JOBS[name]
    options = {"strategy": jddp.LogicalReplicas(8), "batch_norm": "local"}

    def on(num_devices):
        mesh = described_mesh("h100_sxm", devices_per_host=num_devices)
        ddp = jddp.DataParallel(model, optax.sgd(0.1), loss_fn, mesh=mesh, **options)
        return computations_that_sum(ddp.steps.lower(batch).compile().as_text())

    one, two, eight = map(on, (1, 2, 8))
    assert one.total() > 20
    assert two - one == one - two == Counter()
    assert eight - one == one - eight == Counter()
