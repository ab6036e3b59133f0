"""Models as others write them: none knows of replicas, and each must train on many."""

import dataclasses
from collections.abc import Callable
from typing import Any

from models import moe, scanned_transformer, tied_autoencoder, vae


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, made anew by `model`, with its loss, `make_batch(rows, seed)`, and Linen or NNX."""

    model: Callable[[], Any]
    loss_fn: Callable[..., Any]
    make_batch: Callable[[int, int], Any]
    api: str


def linen(module, model):
    return Example(model, module.loss_fn, module.make_batch, "Linen")


def nnx(module):
    return Example(module.make_model, module.loss_fn, module.make_batch, "NNX")


GALLERY: dict[str, Example] = {
    "moe": nnx(moe),
    "scanned_transformer": linen(scanned_transformer, scanned_transformer.Transformer),
    "tied_autoencoder": nnx(tied_autoencoder),
    "vae": linen(vae, vae.VAE),
}
