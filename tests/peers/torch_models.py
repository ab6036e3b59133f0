"""The networks of `jddp.zoo.models` in PyTorch, with parameters as Flax names and lays them out."""

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

EPSILON = 1e-6  # of the ViT's layer norm; GPT-2's is 1e-5


def mlp(sizes):
    layers = OrderedDict()
    for i, (num_inputs, num_outputs) in enumerate(pairwise(sizes)):
        if i > 0:
            layers[f"relu_{i}"] = nn.ReLU()
        layers[f"Dense_{i}"] = nn.Linear(num_inputs, num_outputs)
    return nn.Sequential(layers)


class ChannelsFirst(nn.Module):
    def forward(self, x):
        return x.movedim(-1, 1)


def conv_net(widths, num_classes):
    layers = OrderedDict(channels_first=ChannelsFirst())
    for i, (num_inputs, num_outputs) in enumerate(pairwise(widths)):
        layers[f"Conv_{i}"] = nn.Conv2d(num_inputs, num_outputs, 3, stride=2, padding=1)
        layers[f"relu_{i}"] = nn.ReLU()
    layers |= {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    layers["Dense_0"] = nn.Linear(widths[-1], num_classes)
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    def __init__(self, num_inputs, width, stride, is_bottleneck):
        super().__init__()
        sizes = [(num_inputs, width, 3, stride), (width, width, 3, 1)]
        if is_bottleneck:
            sizes = [(num_inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.layers, num_outputs = [], sizes[-1][1]
        for i, size in enumerate(sizes):
            self.layers.append((convolution(*size), nn.BatchNorm2d(size[1])))
            self.add_module(f"Conv_{i}", self.layers[-1][0])
            self.add_module(f"BatchNorm_{i}", self.layers[-1][1])
        nn.init.zeros_(self.layers[-1][1].weight)
        self.projection = None
        if stride > 1 or num_inputs != num_outputs:
            self.projection = convolution(num_inputs, num_outputs, 1, stride)
            self.projection_norm = nn.BatchNorm2d(num_outputs)

    def forward(self, x):
        y, (*inner, (last, last_norm)) = x, self.layers
        for conv, norm in inner:
            y = F.relu(norm(conv(y)))
        y = last_norm(last(y))
        if self.projection is not None:
            x = self.projection_norm(self.projection(x))
        return F.relu(y + x)


def convolution(num_inputs, num_outputs, size, stride):
    conv = nn.Conv2d(num_inputs, num_outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight)
    return conv


class ResNet(nn.Module):
    def __init__(self, stage_sizes=(3, 4, 6, 3), width=64, num_classes=1000, is_bottleneck=True):
        super().__init__()
        self.Conv_0 = convolution(3, width, 7, 2)
        self.BatchNorm_0 = nn.BatchNorm2d(width)
        blocks, num_inputs = [], width
        for stage, num_blocks in enumerate(stage_sizes):
            for i in range(num_blocks):
                stride, inside = 2 if stage > 0 and i == 0 else 1, width * 2**stage
                blocks.append(ResidualBlock(num_inputs, inside, stride, is_bottleneck))
                num_inputs = inside * (4 if is_bottleneck else 1)
        self.blocks = blocks
        for i, block in enumerate(blocks):
            self.add_module(f"block_{i}", block)
        self.Dense_0 = nn.Linear(num_inputs, num_classes)

    def forward(self, x):
        x = F.relu(self.BatchNorm_0(self.Conv_0(x)))
        x = F.max_pool2d(x, 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.Dense_0(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, num_heads, width, is_causal=True, epsilon=1e-5, gelu="tanh"):
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.approximate = {"tanh": "tanh", "exact": "none"}[gelu]
        self.norm_1 = nn.LayerNorm(width, epsilon)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width, epsilon)
        self.mlp_hidden = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attend(self.norm_1(x))
        hidden = F.gelu(self.mlp_hidden(self.norm_2(x)), approximate=self.approximate)
        return x + self.mlp_output(hidden)

    def attend(self, x):
        x = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = x.permute(2, 0, 3, 1, 4)  # each (b, heads, t, channels of a head)
        x = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.attention_output(x.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocab_size, num_layers, num_heads, width, max_length):
        super().__init__()
        self.Embed_0 = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.Embed_0.weight, std=0.02)
        self.positions = nn.Parameter(torch.zeros(max_length, width))
        self.blocks = [Block(num_heads, width) for _ in range(num_layers)]
        for i, block in enumerate(self.blocks):
            self.add_module(f"block_{i}", block)
        self.LayerNorm_0 = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.Embed_0(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.LayerNorm_0(x), self.Embed_0.weight)


class ViT(nn.Module):
    def __init__(
        self, patch_size, image_size, num_layers, num_heads, width, num_classes, **options
    ):
        """`options`: pooling "mean" or "token", gelu "tanh" or "exact", epsilon."""
        super().__init__()
        pooling = options.pop("pooling", "mean")
        options = {"is_causal": False, "epsilon": EPSILON} | options
        self.Conv_0 = nn.Conv2d(3, width, patch_size, patch_size)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if pooling == "token" else None
        num_patches = (image_size // patch_size) ** 2 + (pooling == "token")
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_patches, width))
        self.blocks = [Block(num_heads, width, **options) for _ in range(num_layers)]
        for i, block in enumerate(self.blocks):
            self.add_module(f"block_{i}", block)
        self.LayerNorm_0 = nn.LayerNorm(width, options["epsilon"])
        self.Dense_0 = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.Conv_0(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.LayerNorm_0(x)
        return self.Dense_0(x.mean(1) if self.token is None else x[:, 0])


MODELS = {"mlp": mlp, "conv_net": conv_net, "gpt": GPT, "resnet": ResNet, "vit": ViT}


def torch_name(path):
    *modules, name = path.split("/")
    name = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(name, name)
    return ".".join([*modules, name])


def from_flax(params):
    """The state dict of parameters that are given by Flax's paths, as NumPy arrays."""
    state = {}
    for path, x in params.items():
        if path.endswith("kernel"):  # (in, out) or (h, w, in, out)
            x = x.transpose(-1, -2, *range(x.ndim - 2))
        state[torch_name(path)] = torch.tensor(x)
    return state


def to_flax(state, paths):
    """The parameters of a state dict by Flax's paths, as NumPy arrays."""
    params = {path: state[torch_name(path)].numpy() for path in paths}
    return {
        path: x.transpose(*range(2, x.ndim), 1, 0) if path.endswith("kernel") else x
        for path, x in params.items()
    }
