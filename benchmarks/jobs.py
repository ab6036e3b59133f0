"""What is trained when reducers are compared, in words that neither JAX nor PyTorch is needed for.

The optimizer is SGD with momentum everywhere, the arithmetic float32, the global batch the same
however many replicas share it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Job:
    """A network and its global batch.

    Attributes:
      model: Name of the model in the tables of `crew_jddp` and of `peers.torch_models`.
      sizes: Arguments of the model there.
      inputs: Shape and largest value of a row of whole numbers, or shape and None for floats.
      num_classes: Number of classes of the targets.
      rows: Rows of the global batch.
      num_steps: Steps of a turn.
    """

    model: str
    inputs: tuple[tuple[int, ...], int | None]
    num_classes: int
    rows: int
    num_steps: int
    sizes: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> dict[str, np.ndarray]:
        """Returns random "inputs" and "targets", the same every time."""
        rng = np.random.default_rng(0)
        shape, largest = self.inputs
        if largest is None:
            inputs = rng.standard_normal((self.rows, *shape), dtype=np.float32)
            targets = rng.integers(self.num_classes, size=self.rows, dtype=np.int32)
        else:
            inputs = rng.integers(largest, size=(self.rows, *shape), dtype=np.int32)
            targets = rng.integers(largest, size=(self.rows, *shape), dtype=np.int32)
        return {"inputs": inputs, "targets": targets}


GPT_SIZES = {"vocab_size": 256, "num_layers": 4, "num_heads": 4, "width": 256, "max_length": 128}
JOBS = {
    "mlp": Job("mlp", ((784,), None), 10, 64, 8, {"sizes": (784, 1024, 1024, 1024, 10)}),
    "gpt": Job("gpt", ((128,), 256), 256, 16, 1, GPT_SIZES),
    # Its logits take more memory than all else: 128 MiB in float32.
    "gpt_words": Job("gpt", ((128,), 16_384), 16_384, 16, 1, GPT_SIZES | {"vocab_size": 16_384}),
    "resnet": Job("resnet", ((16, 16, 3), None), 10, 32, 2),
}
