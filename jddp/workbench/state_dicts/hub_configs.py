"""The `config.json` by which Hugging Face's transformers make a model of the zoo."""

import math

from jddp.typing import JsonObject
from jddp.workbench.state_dicts.entries import Tensors
from jddp.zoo.models.gpt import GPT
from jddp.zoo.models.resnet import BottleneckBlock, ResNet
from jddp.zoo.models.vit import ViT

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
