"""Models as others write them: none knows of replicas, and each must train on many.

    example = GALLERY["vae"]
    ddp = jddp.DataParallel(example.model(), optimizer, example.loss_fn)
    state = ddp.init(seed=0, batch=example.make_batch(16, seed=0))

A file is a model, its loss and rows to learn from, and imports nothing of jddp.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from models import moe, scanned_transformer, tied_autoencoder, vae


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, and what it is trained with.

    Attributes:
      model: Makes it; always the same.
      loss_fn: Of the model, a batch and whether this is training.
      make_batch: `make_batch(rows, seed)`, on the host.
      api: "Linen" or "NNX".
    """

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
