"""State dicts of PyTorch's models give the zoo's the same outputs, and come back unchanged."""

import importlib.util
import logging

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from sweeps import swept

from jddp.ground.errors import ConfigError
from jddp.workbench.state_dicts import from_state_dict, library_of, to_state_dict
from jddp.zoo.models import CNN, GPT, ResNet, ViT
from jddp.zoo.models.resnet import BasicBlock, BottleneckBlock

if has_torch := importlib.util.find_spec("torch") is not None:
    import torch

    from peers import published

pytestmark = pytest.mark.skipif(not has_torch, reason="PyTorch is not installed")
SIZES = {"num_layers": 2, "num_heads": 2, "width": 8}
STAGES = {"stage_sizes": (1, 2), "width": 4, "num_classes": 5}
BASIC = {"is_bottleneck": False}
DEEP = ResNet(block=BottleneckBlock, **STAGES)
VIT = SIZES | {"patch_size": 4, "num_classes": 5}
TOKEN = VIT | {"pooling": "token", "gelu": "exact"}
TEXT = SIZES | {"vocab_size": 11, "max_length": 7}
PAIRS = {  # a model of the zoo, its library, its twin; images of 32 pixels stride evenly
    "resnet, torchvision": (ResNet(block=BasicBlock, **STAGES), "ResNet", STAGES | BASIC),
    "deep resnet, torchvision": (DEEP, "ResNet", STAGES),
    "deep resnet, huggingface": (DEEP, "HuggingFaceResNet", STAGES),
    "vit, torchvision": (ViT(**TOKEN), "VisionTransformer", VIT),
    "vit, huggingface": (ViT(**TOKEN, norm_epsilon=1e-12), "HuggingFaceViT", VIT),
    "gpt, huggingface": (GPT(**TEXT), "GPT2", TEXT),
    "stacked gpt, huggingface": (GPT(**TEXT, scan_layers=True), "GPT2", TEXT),
}


def pair(name):
    model, twin, sizes = PAIRS[name]
    with torch.no_grad():
        return model, published.make(twin, **sizes)


def inputs_of(model):
    rng = np.random.default_rng(0)
    if isinstance(model, GPT):
        return rng.integers(0, 11, (2, 6))
    return rng.standard_normal((2, 32, 32, 3), dtype=np.float32)


def outputs_of(twin, inputs):
    x = torch.tensor(inputs)
    with torch.no_grad():
        return twin.network(x.movedim(-1, 1) if x.ndim == 4 else x).numpy()


@pytest.mark.parametrize("name", swept([*PAIRS], every=3))
def test_weights_of_pytorch_give_equal_logits_and_come_back_unchanged(name):
    model, twin = pair(name)
    tensors, inputs = twin.tensors(), inputs_of(model)
    variables, library = from_state_dict(model, tensors), library_of(model, tensors)
    assert library == name.split(", ")[1]
    own = jax.eval_shape(model.init, jax.random.key(0), inputs)
    shapes = {path: x.shape for path, x in flatten_dict(own, sep="/").items()}
    assert {path: x.shape for path, x in flatten_dict(variables, sep="/").items()} == shapes
    got = jax.jit(model.apply)(variables, inputs)
    np.testing.assert_allclose(got, outputs_of(twin, inputs), rtol=1e-5, atol=1e-5)
    back = to_state_dict(model, variables, library)
    # A count that no model reads, and a weight that is another's.
    assert tensors.keys() - back.keys() == {
        x for x in tensors if x.endswith(("num_batches_tracked", "lm_head.weight"))
    }
    for key, x in back.items():
        np.testing.assert_array_equal(x, tensors[key])


TRANSFORMERS_5 = {
    "vit.encoder.layer.": "vit.layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    ".output.dense": ".mlp.fc2",
}
OTHER_NAMES = [  # of wrapped, bare, older and newer models
    ("resnet, torchvision", {"": "module._orig_mod."}),
    ("gpt, huggingface", {"transformer.": ""}),
    ("gpt, huggingface", {"": "module."}),
    ("vit, torchvision", {"mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"}),
    ("vit, huggingface", TRANSFORMERS_5),
]


@pytest.mark.parametrize("name, names", OTHER_NAMES)
def test_names_of_wrapped_bare_older_and_newer_models_are_known(name, names):
    model, twin = pair(name)
    tensors, renamed = twin.tensors(), {}
    for key, x in tensors.items():
        for there, here in names.items():
            key = key.replace(there, here, 1)
        renamed[key] = x
    assert renamed.keys() != tensors.keys()
    got, want = from_state_dict(model, renamed), from_state_dict(model, tensors)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_missing_and_extra_tensors_are_named_in_one_line_and_with_partial_left_to_the_model():
    model, twin = pair("gpt, huggingface")
    tensors = twin.tensors()
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 7, 7), bool)  # a causal mask
    want = from_state_dict(model, tensors)
    tensors["score.weight"] = np.ones((2, 8), np.float32)
    for name in ("ln_1.bias", "ln_1.weight"):
        del tensors[f"transformer.h.1.{name}"]
    untied = tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}
    with pytest.raises(ConfigError, match="lm_head.weight"):
        from_state_dict(model, untied)
    message = r"at transformer.h.1.ln_1.weight and 1 more \(missing\), score.weight \(not in"
    with pytest.raises(ConfigError, match=message):
        from_state_dict(model, tensors)
    got = from_state_dict(model, tensors, partial=True)
    assert got["params"]["score.weight"].shape == (2, 8)
    assert "norm_1" not in got["params"]["block_1"]
    np.testing.assert_array_equal(got["params"]["positions"], want["params"]["positions"])


def test_a_model_that_computes_otherwise_than_the_library_is_refused_unless_partial(caplog):
    _, twin = pair("vit, torchvision")
    tensors, other = twin.tensors(), ViT(**VIT, pooling="token")
    message = r"at the fields gelu='tanh' \(there 'exact'\), by the names of torchvision\. With"
    with pytest.raises(ConfigError, match=message):
        from_state_dict(other, tensors)
    with caplog.at_level(logging.WARNING, "jddp"):
        from_state_dict(other, tensors, partial=True)
    assert "gelu='tanh' (there 'exact')" in caplog.text


def test_an_unknown_library_model_or_name_is_one_line():
    model, twin = pair("gpt, huggingface")
    tensors = twin.tensors()
    variables = from_state_dict(model, tensors)
    for call, message in (
        (lambda: from_state_dict(model, {"x": np.ones(3)}), "none that a GPT has in huggingface"),
        (lambda: from_state_dict(CNN(), tensors), "none that a CNN has in no library"),
        (lambda: to_state_dict(model, variables, "timm"), "'timm' has no names for a GPT"),
        (
            lambda: to_state_dict(ViT(**VIT), {}, "torchvision"),
            "no params/class_token, which is class_token in torchvision's ViT",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
