"""What `gpu.py` trains, and how much arithmetic it is, without a need for JAX or PyTorch.

Operations are counted by formula, the same for every contender, as Chowdhery et al. do for PaLM
(2022, appendix B, https://arxiv.org/abs/2204.02311): a multiplication and the addition that follows
are two operations, the backward pass costs twice the forward one, and only products and
convolutions count. Attention counts whole, also where a mask makes half of it needless. What is
computed again counts for nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Job:
    """A network, its batch on one device, and its optimizer.

    Attributes:
      model: Name of the model in `jddp.zoo.models`.
      sizes: Arguments of the model there.
      rows: Rows of the batch.
      image_size: Height and width of the images, in pixels; None where rows are tokens.
      sgd: Whether SGD with Nesterov momentum trains it, or else AdamW.
    """

    model: str
    sizes: dict[str, Any]
    rows: int
    image_size: int | None = None
    sgd: bool = False

    @property
    def unit(self) -> str:
        """What is counted a second."""
        return "images" if self.image_size else "tokens"

    @property
    def units_per_row(self) -> int:
        """One image, or the tokens of a sequence."""
        return 1 if self.image_size else self.sizes["max_length"]

    def batch(self, seed: int = 0, rows: int | None = None) -> dict[str, np.ndarray]:
        """Returns random "inputs" and "targets"."""
        rng, rows = np.random.default_rng(seed), rows or self.rows
        if self.image_size:
            shape = (rows, self.image_size, self.image_size, 3)
            inputs = rng.standard_normal(shape, dtype=np.float32)
            return {"inputs": inputs, "targets": self._classes(rng, (rows,))}
        tokens = self._classes(rng, (rows, self.units_per_row + 1))
        return {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}

    def _classes(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        number = self.sizes.get("vocab_size") or self.sizes["num_classes"]
        return rng.integers(number, size=shape, dtype=np.int32)

    def flops_per_row(self) -> float:
        """Operations that training on one row takes."""
        return 6.0 * (self._resnet() if self.model == "resnet50" else self._transformer())

    def _resnet(self) -> int:
        """Multiplications of one forward pass of ResNet-50 over one image."""
        width, size = self.sizes.get("width", 64), self.image_size // 2
        total, size, inputs = size**2 * 7 * 7 * 3 * width, size // 2, width
        for stage, num_blocks in enumerate(self.sizes.get("stage_sizes", (3, 4, 6, 3))):
            inside, outputs = width * 2**stage, 4 * width * 2**stage
            for block in range(num_blocks):
                total += size**2 * inputs * inside
                size = -(-size // 2) if stage > 0 and block == 0 else size
                total += size**2 * (9 * inside**2 + inside * outputs)
                total += size**2 * inputs * outputs if block == 0 else 0
                inputs = outputs
        return total + inputs * self.sizes["num_classes"]

    def _transformer(self) -> int:
        """Multiplications of one forward pass over one row: 12 d^2 + 2 d t a block and position."""
        d = self.sizes["width"]
        if self.image_size:
            patch = self.sizes["patch_size"]
            t = (self.image_size // patch) ** 2
            ends = t * 3 * patch**2 * d + d * self.sizes["num_classes"]
        else:
            t = self.units_per_row
            ends = t * d * self.sizes["vocab_size"]
        return self.sizes["num_layers"] * t * (12 * d**2 + 2 * d * t) + ends


VIT_B16 = {"patch_size": 16, "num_layers": 12, "num_heads": 12, "width": 768, "num_classes": 1000}
# The vocabulary of 50,257 rounded up to a multiple of 128, as is usual: products like it.
GPT2 = {"num_layers": 12, "num_heads": 12, "width": 768, "max_length": 1024, "vocab_size": 50304}

# Few enough rows that all contenders fit on a GPU at once.
JOBS = {
    "resnet50": Job("resnet50", {"num_classes": 1000}, 256, image_size=224, sgd=True),
    "vit_b16": Job("vit", VIT_B16, 128, image_size=224),
    "gpt2_124m": Job("gpt", GPT2, 8),
}
TINY = {"num_layers": 2, "num_heads": 2, "width": 8}
TINY_RESNET = {"stage_sizes": (1, 1), "width": 2, "num_classes": 5}
SMOKE_JOBS = {
    "resnet50": Job("resnet50", TINY_RESNET, 8, image_size=32, sgd=True),
    "vit_b16": Job("vit", TINY | {"patch_size": 4, "num_classes": 5}, 8, image_size=8),
    "gpt2_124m": Job("gpt", TINY | {"max_length": 8, "vocab_size": 16}, 8),
}


def runs(contender: str, job: Job) -> bool:
    """Whether a contender differs from others on this job: by attention, or by batch norm."""
    has_batch_norm = job.model == "resnet50"
    return ("cudnn" if has_batch_norm else "sync") not in contender
