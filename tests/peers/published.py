"""Networks of `torch_models` whose weights have the names and the layout of their libraries."""

from dataclasses import dataclass

import torch
from torch import nn

from peers.torch_models import GPT, ResNet, ViT

TOKEN = {"image_size": 32, "pooling": "token", "gelu": "exact"}
# A network with options; blocks, layers and layers of a block as the library names them.
PUBLISHED = {
    "ResNet": (
        (ResNet, {}),
        "layer{number}.{index}",
        "Conv_0=conv1 BatchNorm_0=bn1 Dense_0=fc",
        "Conv_0=conv1 Conv_1=conv2 Conv_2=conv3 BatchNorm_0=bn1 BatchNorm_1=bn2 BatchNorm_2=bn3"
        " projection=downsample.0 projection_norm=downsample.1",
    ),
    "HuggingFaceResNet": (
        (ResNet, {}),
        "resnet.encoder.stages.{stage}.layers.{index}",
        "Conv_0=resnet.embedder.embedder.convolution Dense_0=classifier.1"
        " BatchNorm_0=resnet.embedder.embedder.normalization",
        "Conv_0=layer.0.convolution Conv_1=layer.1.convolution Conv_2=layer.2.convolution"
        " BatchNorm_0=layer.0.normalization BatchNorm_1=layer.1.normalization"
        " BatchNorm_2=layer.2.normalization"
        " projection=shortcut.convolution projection_norm=shortcut.normalization",
    ),
    "VisionTransformer": (
        (ViT, TOKEN),
        "encoder.layers.encoder_layer_{index}",
        "Conv_0=conv_proj token=class_token positions=encoder.pos_embedding"
        " LayerNorm_0=encoder.ln Dense_0=heads.head",
        "norm_1=ln_1 norm_2=ln_2 mlp_hidden=mlp.0 mlp_output=mlp.3"
        " query_key_value.weight=self_attention.in_proj_weight"
        " query_key_value.bias=self_attention.in_proj_bias"
        " attention_output=self_attention.out_proj",
    ),
    "HuggingFaceViT": (
        (ViT, {**TOKEN, "epsilon": 1e-12}),
        "vit.encoder.layer.{index}",
        "Conv_0=vit.embeddings.patch_embeddings.projection token=vit.embeddings.cls_token"
        " positions=vit.embeddings.position_embeddings LayerNorm_0=vit.layernorm"
        " Dense_0=classifier",
        "norm_1=layernorm_before norm_2=layernorm_after mlp_hidden=intermediate.dense"
        " mlp_output=output.dense attention_output=attention.output.dense"
        " query_key_value=attention.attention.{}",
    ),
    "GPT2": (
        (GPT, {}),
        "transformer.h.{index}",
        "Embed_0=transformer.wte positions=transformer.wpe.weight LayerNorm_0=transformer.ln_f",
        "norm_1=ln_1 norm_2=ln_2 query_key_value=attn.c_attn attention_output=attn.c_proj"
        " mlp_hidden=mlp.c_fc mlp_output=mlp.c_proj",
    ),
}


def by_own_name(text):
    return dict(pair.split("=") for pair in text.split())


@dataclass(frozen=True)
class Twin:
    """A network, and the published name of each of its layers by its own."""

    network: nn.Module
    names: dict[str, str]

    def tensors(self):
        """The published state dict, as NumPy arrays."""
        found = {}
        for own, x in self.network.state_dict().items():
            layer, _, kind = own.rpartition(".")
            name = self.names.get(own) or f"{self.names[layer]}.{kind}"
            if "{}" in name:
                names = map(name.format, ("query", "key", "value"))
                found |= dict(zip(names, x.chunk(3), strict=True))
            else:  # Hugging Face's linear layer of GPT-2 has its inputs first.
                found[name] = x.T if ".c_" in name and kind == "weight" else x
        if isinstance(self.network, GPT):
            found["lm_head.weight"] = found["transformer.wte.weight"]
        return {name: x.numpy().copy() for name, x in found.items()}


def make(twin, *, seed=0, **sizes):
    """A twin in evaluation, with other weights and statistics than it begins with."""
    (network, options), pattern, layers, in_block = PUBLISHED[twin]
    stages = enumerate(sizes.get("stage_sizes") or [sizes["num_layers"]])
    places = [{"stage": x, "number": x + 1, "index": i} for x, num in stages for i in range(num)]
    names = by_own_name(layers)
    for number, place in enumerate(places):
        for own, name in by_own_name(in_block).items():
            names[f"block_{number}.{own}"] = f"{pattern.format(**place)}.{name}"
    network, generator = network(**options, **sizes), torch.Generator().manual_seed(seed)
    for name, x in network.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            values = torch.randn(x.shape, generator=generator)
            x.copy_(1 + values.abs() if name.endswith("running_var") else 0.3 * values)
    return Twin(network.eval(), names)
