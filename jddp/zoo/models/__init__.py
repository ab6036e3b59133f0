"""Models by name. Any other Flax module can be trained too.

    model = MODELS["gpt"](num_layers=6, width=384, dtype="bfloat16")

They are plain Flax: no mesh, no axis names (batch norm is synchronized by `DataParallel`),
parameters in float32 and arithmetic in `dtype`, outputs in float32. Linen modules are called as
`model(inputs, train)`; `CNN_NNX` is the small network in NNX.
"""

from collections.abc import Callable

from flax import linen as nn
from flax import nnx

from jddp.zoo.models.cnn import CNN
from jddp.zoo.models.cnn_nnx import CNN as CNN_NNX
from jddp.zoo.models.gpt import GPT
from jddp.zoo.models.mlp import MLP
from jddp.zoo.models.resnet import ResNet, resnet18, resnet50
from jddp.zoo.models.vit import ViT

MODELS: dict[str, Callable[..., nn.Module | nnx.Module]] = {
    "cnn": CNN,
    "cnn_nnx": CNN_NNX,
    "gpt": GPT,
    "mlp": MLP,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vit": ViT,
}

__all__ = ["CNN", "CNN_NNX", "GPT", "MLP", "MODELS", "ResNet", "ViT", "resnet18", "resnet50"]
