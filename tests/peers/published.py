"""Models by hand with the names and arithmetic of torchvision and Hugging Face."""

import torch
import torch.nn.functional as F
from torch import nn


def bare():
    """A module that holds others."""
    return nn.Module()


def conv(num_inputs, num_outputs, size, stride=1):
    return nn.Conv2d(num_inputs, num_outputs, size, stride, size // 2, bias=False)


def tree(root, path, module):
    """Puts a module or a parameter at a dotted path."""
    *above, name = path.split(".")
    for part in above:
        if not hasattr(root, part):
            root.add_module(part, bare())
        root = getattr(root, part)
    setattr(root, name, module)


class ResNet(nn.Module):
    """A ResNet by given names: of the stem, of a block's parts, and of the head."""

    stem, head = ("conv1", "bn1"), "fc"
    shortcut = ("downsample.0", "downsample.1")

    @staticmethod
    def block(stage, index):
        return f"layer{stage + 1}.{index}"

    @staticmethod
    def parts(i):
        return f"conv{i + 1}", f"bn{i + 1}"

    def __init__(self, stage_sizes, width, num_classes, is_bottleneck=True):
        super().__init__()
        self._add(self.stem, conv(3, width, 7, 2))
        self.plan, num_inputs = [], width
        for stage, num_blocks in enumerate(stage_sizes):
            for index in range(num_blocks):
                stride, inside = (2 if stage > 0 and index == 0 else 1), width * 2**stage
                num_outputs = inside * (4 if is_bottleneck else 1)
                convs = [conv(num_inputs, inside, 3, stride), conv(inside, inside, 3)]
                if is_bottleneck:
                    convs = [conv(num_inputs, inside, 1), conv(inside, inside, 3, stride)]
                    convs += [conv(inside, num_outputs, 1)]
                there = self.block(stage, index)
                names = [[f"{there}.{x}" for x in self.parts(i)] for i in range(len(convs))]
                for pair, layer in zip(names, convs, strict=True):
                    self._add(pair, layer)
                projected = None
                if stride > 1 or num_inputs != num_outputs:
                    projected = [f"{there}.{x}" for x in self.shortcut]
                    self._add(projected, conv(num_inputs, num_outputs, 1, stride))
                self.plan.append((names, projected))
                num_inputs = num_outputs
        tree(self, self.head, nn.Linear(num_inputs, num_classes))

    def _add(self, names, layer):
        tree(self, names[0], layer)
        tree(self, names[1], nn.BatchNorm2d(layer.out_channels))

    def _normed(self, names, x):
        return self.get_submodule(names[1])(self.get_submodule(names[0])(x))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self._normed(self.stem, x)), 3, 2, 1)
        for (*inner, last), projected in self.plan:
            y = x
            for names in inner:
                y = F.relu(self._normed(names, y))
            x = self._normed(projected, x) if projected else x
            x = F.relu(self._normed(last, y) + x)
        return self.get_submodule(self.head)(x.mean((2, 3)))


class HuggingFaceResNet(ResNet):
    stem = tuple(f"resnet.embedder.embedder.{x}" for x in ("convolution", "normalization"))
    shortcut, head = ("shortcut.convolution", "shortcut.normalization"), "classifier.1"

    @staticmethod
    def block(stage, index):
        return f"resnet.encoder.stages.{stage}.layers.{index}"

    @staticmethod
    def parts(i):
        return f"layer.{i}.convolution", f"layer.{i}.normalization"


def attend(query, key, value, num_heads, is_causal=False):
    query, key, value = (
        x.unflatten(-1, (num_heads, -1)).movedim(-2, 1) for x in (query, key, value)
    )
    x = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    return x.movedim(1, -2).flatten(-2)


class VisionTransformer(nn.Module):
    """A vision transformer by given names: of the stem, of a block, and of the head."""

    stem, token, positions = "conv_proj", "class_token", "encoder.pos_embedding"
    block, norms, mlp = "encoder.layers.encoder_layer_", ("ln_1", "ln_2"), ("mlp.0", "mlp.3")
    last, head, epsilon = "encoder.ln", "heads.head", 1e-6

    def __init__(self, patch_size, num_layers, num_heads, width, num_classes):
        super().__init__()
        num_patches = (32 // patch_size) ** 2
        self.num_heads = num_heads
        tree(self, self.stem, nn.Conv2d(3, width, patch_size, patch_size))
        tree(self, self.token, nn.Parameter(torch.zeros(1, 1, width)))
        tree(self, self.positions, nn.Parameter(torch.zeros(1, num_patches + 1, width)))
        self.blocks = [f"{self.block}{i}." for i in range(num_layers)]
        for there in self.blocks:
            for name in self.norms:
                tree(self, there + name, nn.LayerNorm(width, self.epsilon))
            tree(self, there + self.mlp[0], nn.Linear(width, 4 * width))
            tree(self, there + self.mlp[1], nn.Linear(4 * width, width))
            self._add_attention(there, width)
        tree(self, self.last, nn.LayerNorm(width, self.epsilon))
        tree(self, self.head, nn.Linear(width, num_classes))

    def _add_attention(self, there, width):
        attention = nn.MultiheadAttention(width, self.num_heads, batch_first=True)
        tree(self, f"{there}self_attention", attention)

    def _attend(self, there, y):
        attention = self.get_submodule(f"{there}self_attention")
        return attention(y, y, y, need_weights=False)[0]

    def forward(self, x):
        call = self.get_submodule
        x = call(self.stem)(x).flatten(2).transpose(1, 2)
        token = self.get_parameter(self.token).expand(len(x), -1, -1)
        x = torch.cat([token, x], 1) + self.get_parameter(self.positions)
        for there in self.blocks:
            first, second, hidden, output = (call(there + name) for name in self.norms + self.mlp)
            x = x + self._attend(there, first(x))
            x = x + output(F.gelu(hidden(second(x))))
        return call(self.head)(call(self.last)(x)[:, 0])


class HuggingFaceViT(VisionTransformer):
    stem, token = "vit.embeddings.patch_embeddings.projection", "vit.embeddings.cls_token"
    positions, block = "vit.embeddings.position_embeddings", "vit.encoder.layer."
    norms = ("layernorm_before", "layernorm_after")
    mlp, last = ("intermediate.dense", "output.dense"), "vit.layernorm"
    head, epsilon = "classifier", 1e-12
    attention = ("attention.attention.query", "attention.attention.key")
    attention += ("attention.attention.value", "attention.output.dense")

    def _add_attention(self, there, width):
        for name in self.attention:
            tree(self, there + name, nn.Linear(width, width))

    def _attend(self, there, y):
        *inputs, output = (self.get_submodule(there + name) for name in self.attention)
        return output(attend(*(layer(y) for layer in inputs), self.num_heads))


class Conv1D(nn.Module):
    """Hugging Face's linear layer of GPT-2, whose weight has its inputs first."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class GPT2Block(nn.Module):
    def __init__(self, num_heads, width):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        tree(self, "attn.c_attn", Conv1D(width, 3 * width))
        tree(self, "attn.c_proj", Conv1D(width, width))
        tree(self, "mlp.c_fc", Conv1D(width, 4 * width))
        tree(self, "mlp.c_proj", Conv1D(4 * width, width))

    def forward(self, x):
        parts = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.attn.c_proj(attend(*parts, self.num_heads, is_causal=True))
        hidden = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp.c_proj(hidden)


class GPT2(nn.Module):
    """`GPT2LMHeadModel`: its last layer is its embedding."""

    def __init__(self, vocab_size, max_length, num_layers, num_heads, width):
        super().__init__()
        self.transformer = bare()
        self.transformer.wte = nn.Embedding(vocab_size, width)
        self.transformer.wpe = nn.Embedding(max_length, width)
        self.transformer.h = nn.ModuleList(GPT2Block(num_heads, width) for _ in range(num_layers))
        self.transformer.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe.weight[: tokens.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def with_random_weights(model, seed=0):
    """The model in evaluation, with other weights and statistics than it begins with."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        values = torch.randn(x.shape, generator=generator)
        x.copy_(1 + values.abs() if name.endswith("running_var") else 0.3 * values)
    return model.eval()


def tensors_of(model):
    """The state dict as NumPy arrays."""
    return {name: x.numpy().copy() for name, x in model.state_dict().items()}
