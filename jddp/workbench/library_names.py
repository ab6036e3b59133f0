"""Names of tensors that libraries have for the models of the zoo, and the configs of their models.

table = [*dense("Dense_0", "fc"), *tracked_norm("BatchNorm_0", "bn1")]
table[0].read([weight])      # params/Dense_0/kernel, from fc.weight
table[0].write(kernel)       # [fc.weight]
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jddp.ground.typing import JsonObject
from jddp.zoo.models.resnet import BottleneckBlock, ResNet
from jddp.zoo.models.transformer import GPT, ViT

Tensors = dict[str, np.ndarray]  # Arrays by their names in a state dict, or by their paths in Flax.

# The axes of a tensor, in the order in which Flax has them.
LINEAR = (1, 0)  # A tensor has (outputs, inputs).
CONV = (2, 3, 1, 0)  # A tensor has (outputs, inputs, height, width).


class Entry(NamedTuple):
    """An array and its tensors.

    Attributes:
      path: Path of the array among Flax's variables.
      names: Names of the tensors, which stand side by side along the array's last axis.
      axes: Axes of a tensor in the order of the array's; () if they are in it.
    """

    path: str
    names: tuple[str, ...]
    axes: tuple[int, ...] = ()

    def read(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The array; tensors with another number of axes stay as they are."""
        parts = [x.transpose(self.axes) if x.ndim == len(self.axes) else x for x in tensors]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def write(self, array: np.ndarray) -> list[np.ndarray]:
        """The tensors."""
        parts = np.split(array, len(self.names), axis=-1)
        back = [self.axes.index(axis) for axis in range(len(self.axes))] or range(array.ndim)
        return [np.ascontiguousarray(x.transpose(back)) for x in parts]


def dense(path: str, *names: str, axes: tuple[int, ...] = LINEAR) -> Iterator[Entry]:
    """A layer with a kernel and a bias, which PyTorch has as one layer or as several."""
    yield Entry(f"params/{path}/kernel", tuple(f"{name}.weight" for name in names), axes)
    yield Entry(f"params/{path}/bias", tuple(f"{name}.bias" for name in names))


def convolution(path: str, name: str) -> Iterator[Entry]:
    """A convolution without a bias."""
    yield Entry(f"params/{path}/kernel", (f"{name}.weight",), CONV)


def norm(path: str, name: str) -> Iterator[Entry]:
    """A layer norm."""
    yield Entry(f"params/{path}/scale", (f"{name}.weight",))
    yield Entry(f"params/{path}/bias", (f"{name}.bias",))


def tracked_norm(path: str, name: str) -> Iterator[Entry]:
    """A batch norm with its running statistics."""
    yield from norm(path, name)
    yield Entry(f"batch_stats/{path}/mean", (f"{name}.running_mean",))
    yield Entry(f"batch_stats/{path}/var", (f"{name}.running_var",))


def stack_blocks(arrays: Tensors, num_layers: int) -> Tensors:
    """The arrays of blocks 0, 1, ... along a new first axis, as `Transformer.scan_layers` has them.

    An array that some blocks lack stays where it is.
    """
    stacked = dict(arrays)
    for path in arrays:
        each = [path.replace("/block_0/", f"/block_{i}/") for i in range(num_layers)]
        if "/block_0/" in path and stacked.keys() >= {*each}:
            rows = [stacked.pop(one) for one in each]
            stacked[path.replace("/block_0/", "/blocks/")] = np.stack(rows)
    return stacked


def unstack_blocks(arrays: Tensors) -> Tensors:
    """The arrays of stacked blocks, one by one; the inverse of `stack_blocks`."""
    apart: Tensors = {}
    for path, x in arrays.items():
        if "/blocks/" in path:
            apart |= {path.replace("/blocks/", f"/block_{i}/"): row for i, row in enumerate(x)}
        else:
            apart[path] = x
    return apart


def torchvision_resnet(model: ResNet) -> Iterator[Entry]:
    """The names of torchvision's `resnet18`, `resnet50` and the like, and of timm's."""
    yield from convolution("Conv_0", "conv1")
    yield from tracked_norm("BatchNorm_0", "bn1")
    for here, stage, index in _blocks(model):
        there = f"layer{stage + 1}.{index}"
        for i in range(_num_convolutions(model)):
            yield from convolution(f"{here}/Conv_{i}", f"{there}.conv{i + 1}")
            yield from tracked_norm(f"{here}/BatchNorm_{i}", f"{there}.bn{i + 1}")
        if _is_projected(model, stage, index):
            yield from convolution(f"{here}/projection", f"{there}.downsample.0")
            yield from tracked_norm(f"{here}/projection_norm", f"{there}.downsample.1")
    yield from dense("Dense_0", "fc")


def huggingface_resnet(model: ResNet) -> Iterator[Entry]:
    """The names of `ResNetForImageClassification` in Hugging Face's transformers."""
    yield from convolution("Conv_0", "resnet.embedder.embedder.convolution")
    yield from tracked_norm("BatchNorm_0", "resnet.embedder.embedder.normalization")
    for here, stage, index in _blocks(model):
        there = f"resnet.encoder.stages.{stage}.layers.{index}"
        for i in range(_num_convolutions(model)):
            yield from convolution(f"{here}/Conv_{i}", f"{there}.layer.{i}.convolution")
            yield from tracked_norm(f"{here}/BatchNorm_{i}", f"{there}.layer.{i}.normalization")
        if _is_projected(model, stage, index):
            yield from convolution(f"{here}/projection", f"{there}.shortcut.convolution")
            yield from tracked_norm(f"{here}/projection_norm", f"{there}.shortcut.normalization")
    yield from dense("Dense_0", "classifier.1")


def _blocks(model: ResNet) -> Iterator[tuple[str, int, int]]:
    """Each block's path, its stage, and its place in the stage."""
    places = [(stage, i) for stage, num in enumerate(model.stage_sizes) for i in range(num)]
    for number, (stage, index) in enumerate(places):
        yield f"{model.block.__name__}_{number}", stage, index


def _num_convolutions(model: ResNet) -> int:
    return 3 if model.block is BottleneckBlock else 2


def _is_projected(model: ResNet, stage: int, index: int) -> bool:
    return index == 0 and (stage > 0 or model.block is BottleneckBlock)


def torchvision_vit(model: ViT) -> Iterator[Entry]:
    """The names of torchvision's `vit_b_16` and the like."""
    yield Entry("params/class_token", ("class_token",))
    yield Entry("params/positions", ("encoder.pos_embedding",))
    yield from dense("Conv_0", "conv_proj", axes=CONV)
    for i in range(model.num_layers):
        here, there = f"block_{i}", f"encoder.layers.encoder_layer_{i}"
        in_one = f"{there}.self_attention.in_proj"
        yield from norm(f"{here}/norm_1", f"{there}.ln_1")
        yield Entry(f"params/{here}/query_key_value/kernel", (f"{in_one}_weight",), LINEAR)
        yield Entry(f"params/{here}/query_key_value/bias", (f"{in_one}_bias",))
        yield from dense(f"{here}/attention_output", f"{there}.self_attention.out_proj")
        yield from norm(f"{here}/norm_2", f"{there}.ln_2")
        yield from dense(f"{here}/mlp_hidden", f"{there}.mlp.0")
        yield from dense(f"{here}/mlp_output", f"{there}.mlp.3")
    yield from norm("LayerNorm_0", "encoder.ln")
    yield from dense("Dense_0", "heads.head")


def huggingface_vit(model: ViT) -> Iterator[Entry]:
    """The names of `ViTForImageClassification` in Hugging Face's transformers."""
    yield Entry("params/class_token", ("vit.embeddings.cls_token",))
    yield Entry("params/positions", ("vit.embeddings.position_embeddings",))
    yield from dense("Conv_0", "vit.embeddings.patch_embeddings.projection", axes=CONV)
    for i in range(model.num_layers):
        here, there = f"block_{i}", f"vit.encoder.layer.{i}"
        apart = [f"{there}.attention.attention.{name}" for name in ("query", "key", "value")]
        yield from norm(f"{here}/norm_1", f"{there}.layernorm_before")
        yield from dense(f"{here}/query_key_value", *apart)
        yield from dense(f"{here}/attention_output", f"{there}.attention.output.dense")
        yield from norm(f"{here}/norm_2", f"{there}.layernorm_after")
        yield from dense(f"{here}/mlp_hidden", f"{there}.intermediate.dense")
        yield from dense(f"{here}/mlp_output", f"{there}.output.dense")
    yield from norm("LayerNorm_0", "vit.layernorm")
    yield from dense("Dense_0", "classifier")


def huggingface_gpt(model: GPT) -> Iterator[Entry]:
    """The names of `GPT2LMHeadModel` in transformers, whose Conv1D has its inputs first."""
    yield Entry("params/Embed_0/embedding", ("transformer.wte.weight",))
    yield Entry("params/positions", ("transformer.wpe.weight",))
    for i in range(model.num_layers):
        here, there = f"block_{i}", f"transformer.h.{i}"
        yield from norm(f"{here}/norm_1", f"{there}.ln_1")
        yield from dense(f"{here}/query_key_value", f"{there}.attn.c_attn", axes=())
        yield from dense(f"{here}/attention_output", f"{there}.attn.c_proj", axes=())
        yield from norm(f"{here}/norm_2", f"{there}.ln_2")
        yield from dense(f"{here}/mlp_hidden", f"{there}.mlp.c_fc", axes=())
        yield from dense(f"{here}/mlp_output", f"{there}.mlp.c_proj", axes=())
    yield from norm("LayerNorm_0", "transformer.ln_f")


GELU = {"exact": "gelu", "tanh": "gelu_new"}


def gpt_config(model: GPT, tensors: Tensors) -> JsonObject:
    """The config of a `GPT2LMHeadModel`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_length,
        "n_embd": model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "activation_function": GELU[model.gelu],
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": True,
    }


def resnet_config(model: ResNet, tensors: Tensors) -> JsonObject:
    """The config of a `ResNetForImageClassification`."""
    is_deep = model.block is BottleneckBlock
    widths = [model.width * 2**stage for stage in range(len(model.stage_sizes))]
    return {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "num_channels": tensors["resnet.embedder.embedder.convolution.weight"].shape[1],
        "embedding_size": model.width,
        "hidden_sizes": [4 * width if is_deep else width for width in widths],
        "depths": [*model.stage_sizes],
        "layer_type": "bottleneck" if is_deep else "basic",
        "id2label": _labels(model.num_classes),
    }


def vit_config(model: ViT, tensors: Tensors) -> JsonObject:
    """The config of a `ViTForImageClassification`."""
    num_patches = tensors["vit.embeddings.position_embeddings"].shape[1] - 1
    patches = tensors["vit.embeddings.patch_embeddings.projection.weight"]
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": 4 * model.width,
        "hidden_act": GELU[model.gelu],
        "layer_norm_eps": model.norm_epsilon,
        "patch_size": model.patch_size,
        "image_size": model.patch_size * math.isqrt(num_patches),
        "num_channels": patches.shape[1],
        "id2label": _labels(model.num_classes),
    }


def _labels(num: int) -> dict[str, str]:
    return {str(i): f"LABEL_{i}" for i in range(num)}
