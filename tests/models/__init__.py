"""Models as others write them: none knows of replicas, and each must train on many.

    example = GALLERY["vae"]
    ddp = jddp.DataParallel(example.model(), optimizer, example.loss_fn, **example.options)
    state = ddp.init(seed=0, batch=example.make_batch(16, seed=0))

A file is a model, its loss and rows to learn from, and imports nothing of jddp.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from models import (
    diffusion,
    graph_net,
    lstm_tagger,
    moe,
    resnet_nnx,
    scanned_transformer,
    seq2seq,
    spectral_critic,
    stacked_nnx,
    tied_autoencoder,
    vae,
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, and what it is trained with.

    Attributes:
      model: Makes it; always the same.
      loss_fn: Of the model, a batch and whether this is training.
      make_batch: `make_batch(rows, seed)`, on the host.
      api: "Linen" or "NNX".
      options: Of `jddp.DataParallel`, beyond its defaults.
    """

    model: Callable[[], Any]
    loss_fn: Callable[..., Any]
    make_batch: Callable[[int, int], Any]
    api: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def linen(module, model):
    return Example(model, module.loss_fn, module.make_batch, "Linen")


def nnx(module, **options):
    return Example(module.make_model, module.loss_fn, module.make_batch, "NNX", options)


GALLERY: dict[str, Example] = {
    "diffusion": nnx(diffusion, ema_decay=0.9),
    "graph_net": linen(graph_net, graph_net.GraphNet),
    "lstm_tagger": linen(lstm_tagger, lstm_tagger.Tagger),
    "moe": nnx(moe),
    "resnet_nnx": nnx(resnet_nnx),
    "scanned_transformer": linen(scanned_transformer, scanned_transformer.Transformer),
    "seq2seq": linen(seq2seq, seq2seq.Seq2Seq),
    "spectral_critic": linen(spectral_critic, spectral_critic.Critic),
    "stacked_nnx": nnx(stacked_nnx),
    "tied_autoencoder": nnx(tied_autoencoder),
    "vae": linen(vae, vae.VAE),
}
