"""The models and batches that the parts train, for each platform."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from acceptance.result import Machine
from jddp.engine.data_parallel import DataParallel
from jddp.ground.typing import JsonObject, LossFn
from jddp.zoo.losses import cross_entropy, next_token
from jddp.zoo.models import CNN, GPT, Module, ResNet
from jddp.zoo.models.resnet import BasicBlock
from jddp.zoo.optimizers import Transformation, make_optimizer

# The gradients of "medium" are 64 MiB; "large" is GPT-2 124M.
_TINY = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "width": 32, "max_length": 16}
_GPTS: dict[str, JsonObject] = {
    "small": {"num_layers": 2, "num_heads": 4, "width": 128, "max_length": 128},
    "medium": {"vocab_size": 8192, "num_layers": 4, "num_heads": 8, "width": 512},
    "large": {
        **{"vocab_size": 50257, "num_layers": 12, "num_heads": 12, "width": 768},
        **{"max_length": 1024, "dtype": "bfloat16"},
    },
}
_WARM_STEPS = 3


class Workload(NamedTuple):
    """A model with its loss and rows.

    Attributes:
      model: The model.
      loss: The loss.
      batch: Rows for some devices.
    """

    model: Module
    loss: LossFn
    batch: dict[str, np.ndarray]

    def replicate(self, mesh: Sequence[jax.Device] | None = None, **options: Any) -> DataParallel:
        """The model on all devices, or on the devices of `mesh`."""
        return DataParallel(self.model, adam(), self.loss, mesh=mesh, **options)


def adam() -> Transformation:
    """The optimizer of all parts."""
    return make_optimizer("adamw", schedule=lambda step: 1e-3)[0]


def gpt(machine: Machine, size: str, num_devices: int) -> Workload:
    """A GPT with a few rows per device; the gradient of its embeddings is a scatter."""
    model = GPT(**(_GPTS[size] if machine.is_gpu else _TINY))
    rows = 8 if machine.is_gpu and size != "large" else 4
    shape = rows * num_devices, model.max_length + 1
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=shape, dtype=np.int32)
    return Workload(model, next_token, {"tokens": tokens})


def cnn(machine: Machine) -> Workload:
    """The default model: convolutions and batch norm; with one layer on CPUs."""
    widths, image, rows = ((32, 64, 128), 28, 32) if machine.is_gpu else ((8,), 8, 8)
    return Workload(CNN(widths), cross_entropy, _images(image, 1, rows, machine))


def resnet(machine: Machine) -> Workload:
    """Two residual blocks with batch norm; one on CPUs."""
    sizes, image, rows = ((1, 1), 64, 32) if machine.is_gpu else ((1,), 8, 4)
    model = ResNet(sizes, BasicBlock, width=image, num_classes=10, stem="cifar")
    return Workload(model, cross_entropy, _images(image, 3, rows, machine))


def _images(size: int, channels: int, rows: int, machine: Machine) -> dict[str, np.ndarray]:
    rng, num = np.random.default_rng(0), rows * machine.num_devices
    images = rng.standard_normal((num, size, size, channels), np.float32)
    return {"image": images, "label": rng.integers(10, size=num, dtype=np.int32)}


def step_seconds(ddp: DataParallel, batch: dict[str, np.ndarray], num_steps: int) -> float:
    """The mean time of steps that are sent without waiting between them."""
    state, rows = ddp.init(0, batch), ddp.shard_batch(batch)
    for i in range(_WARM_STEPS + num_steps):
        if i == _WARM_STEPS:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, _ = ddp.step(state, rows)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / num_steps
