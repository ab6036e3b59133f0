"""The models that torchvision and transformers build give what the zoo's give; where installed.

pip install torchvision transformers; pytest -m long tests/workbench/test_published_models.py
"""

import importlib.util

import jax
import numpy as np
import pytest

from jddp.workbench.state_dicts import from_state_dict, library_of, to_state_dict
from jddp.zoo.models import gpt2, resnet18, resnet50, vit_b16

if has_torch := importlib.util.find_spec("torch") is not None:
    import torch

    from peers.published import tensors_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not has_torch, reason="PyTorch is not installed"),
]

IMAGES = np.random.default_rng(0).standard_normal((2, 224, 224, 3), dtype=np.float32)
TOKENS = np.random.default_rng(0).integers(0, 50257, (2, 100))


def in_torchvision(name):
    models = pytest.importorskip("torchvision.models")
    return getattr(models, name)(weights=None)


def in_transformers(name, config, **fields):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(getattr(transformers, config)(**fields))


def with_statistics(twin, inputs, seed=0):
    """The model in evaluation: nothing is zero, and batch norms have the inputs' statistics."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for x in twin.parameters():
            if x.ndim == 1 or x.shape[0] == 1 or not x.any():  # what begins as zero or one
                x += 0.02 * torch.randn_like(x)
        for layer in twin.modules():
            layer.momentum = 1.0
        if any(isinstance(layer, torch.nn.BatchNorm2d) for layer in twin.modules()):
            twin.train()(inputs)
    return twin.eval()


LABELS = {"id2label": {i: str(i) for i in range(1000)}}
BUILT = {
    "resnet18": (resnet18(), lambda: in_torchvision("resnet18")),
    "resnet50": (resnet50(), lambda: in_torchvision("resnet50")),
    "vit_b_16": (vit_b16(), lambda: in_torchvision("vit_b_16")),
    "ResNet": (
        resnet50(),
        lambda: in_transformers("ResNetForImageClassification", "ResNetConfig", **LABELS),
    ),
    "ViT": (
        vit_b16(norm_epsilon=1e-12),
        lambda: in_transformers("ViTForImageClassification", "ViTConfig", **LABELS),
    ),
    "GPT2": (gpt2(), lambda: in_transformers("GPT2LMHeadModel", "GPT2Config")),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_model_of_a_library_gives_the_same_logits(name):
    model, build = BUILT[name]
    # In double precision: in single, 50 layers of two libraries differ by more than 1e-5.
    inputs = TOKENS if name == "GPT2" else IMAGES.astype(np.float64)
    there = torch.tensor(inputs if name == "GPT2" else inputs.transpose(0, 3, 1, 2))
    twin = with_statistics(build(), there.float() if there.ndim == 4 else there).double()
    variables = from_state_dict(model, tensors_of(twin))
    with jax.enable_x64(True):
        variables = jax.tree.map(lambda x: x.astype(np.float64), variables)
        got = jax.jit(model.apply)(variables, inputs)
    with torch.no_grad():
        want = twin(there)
    want = getattr(want, "logits", want).numpy()
    print(name, f"differs by {abs(got - want).max():.1e} in logits up to {abs(want).max():.1f}")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    back = to_state_dict(model, variables, library_of(model, twin.state_dict()))
    assert back.keys() <= twin.state_dict().keys() or name == "ViT"
