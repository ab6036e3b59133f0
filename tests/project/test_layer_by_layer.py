"""What docs/pytorch.md says of Flax's and optax's defaults, layer by layer, is true."""

import inspect

import jax.numpy as jnp
import optax
from flax import linen as nn
from runs import ROOT

PAGE = (ROOT / "docs" / "pytorch.md").read_text().partition("## Layer by layer")[2]


def row_of(name):
    return next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}"))


def test_the_defaults_that_the_page_names_are_those_of_flax_and_optax():
    assert nn.LayerNorm().epsilon == nn.GroupNorm().epsilon == 1e-6
    assert "epsilon is 1e-6" in row_of("LayerNorm")
    assert (nn.BatchNorm().momentum, nn.BatchNorm().epsilon) == (0.99, 1e-5)
    assert "momentum 0.99" in row_of("BatchNorm2d")
    assert nn.Conv(1, (3, 3)).padding == "SAME"
    decay = inspect.signature(optax.adamw).parameters["weight_decay"].default
    assert (decay, "1e-4" in row_of("AdamW")) == (1e-4, True)
    x = jnp.linspace(-3, 3, 50)
    assert jnp.abs(nn.gelu(x) - nn.gelu(x, approximate=False)).max() > 1e-4
    assert "approximate=False" in row_of("GELU")
