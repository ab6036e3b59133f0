"""The names that torchvision and Hugging Face give to the tensors of the zoo's models.

Each table is a function of the model, whose fields decide which layers there are.
"""

from collections.abc import Iterator

from jddp.workbench.state_dicts.entries import (
    CONV,
    LINEAR,
    Entry,
    convolution,
    dense,
    norm,
    tracked_norm,
)
from jddp.zoo.models.gpt import GPT
from jddp.zoo.models.resnet import BottleneckBlock, ResNet
from jddp.zoo.models.vit import ViT


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
