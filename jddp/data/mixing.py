"""Mixup and CutMix: each image is mixed with another one, and keeps both labels.

    mix = Mix(mixup=0.2)
    batch = mix.paired(batch, others, uniform)    # on the host: adds the other examples
    batch = mix(batch, draws)                     # there, or in the step on the devices

References:
  Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
  https://arxiv.org/abs/1710.09412
  Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
  Features", ICCV 2019. https://arxiv.org/abs/1905.04899
"""

from dataclasses import dataclass

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.transforms import namespace_of
from jddp.errors import ConfigError

NUM_PAIR_DRAWS = 5  # the other example, the kind, the weight, and the place of a box
MIX = "mix"  # the entry of a batch with whether a box is cut, the weight, and the box's centre


@dataclass(frozen=True)
class Mix:
    """Mixup, CutMix, or either of them with equal probability.

    Attributes:
      mixup: Parameter of mixup: weights are drawn from Beta(mixup, mixup). None for none.
      cutmix: Parameter of CutMix: shares of the area are drawn from Beta(cutmix, cutmix). None for
        none.
    """

    mixup: float | None = None
    cutmix: float | None = None
    num_draws = 0

    def others(self, positions: np.ndarray, uniform: np.ndarray, num_examples: int) -> np.ndarray:
        """The position in the run of the example with which each is mixed, of the same epoch.

        Args:
          positions: Positions of the examples in the run.
          uniform: Random numbers in [0, 1), `(b, NUM_PAIR_DRAWS)`.
          num_examples: Number of positions of an epoch.
        """
        begin = positions // num_examples * num_examples
        return begin + (uniform[:, 0] * num_examples).astype(np.int64)

    def paired(self, batch: NumpyBatch, others: NumpyBatch, uniform: np.ndarray) -> NumpyBatch:
        """The batch, with the other image and label of each row, and how to mix them.

        A row whose other example has mask 0 is mixed with nothing: it keeps all of its weight.

        Raises:
          ConfigError: If the examples are not images with labels.
        """
        from scipy.special import betaincinv  # here, as its import takes a while

        if not {"image", "label"} <= batch.keys():
            held = ", ".join(batch)
            raise ConfigError(
                f"data.mixup and data.cutmix mix images with labels, but the data has {held}."
            )
        share_of_cuts = 0.0 if self.cutmix is None else 1.0 if self.mixup is None else 0.5
        is_cut = uniform[:, 1] < share_of_cuts
        parameter = np.where(is_cut, self.cutmix or 1.0, self.mixup or 1.0)
        weight = betaincinv(parameter, parameter, uniform[:, 2])
        if "mask" in others:
            weight[~others["mask"].reshape(len(weight), -1).any(1)] = 1
        how = np.column_stack([is_cut, weight, uniform[:, 3:]]).astype(np.float32)
        return batch | {"other_image": others["image"], "other_label": others["label"], MIX: how}

    def __call__(self, batch: NumpyBatch, draws: np.ndarray) -> NumpyBatch:
        """The mixed images, with "other_label" and "share", by which the loss weights the labels.

        Rows without another image, as in evaluation, stay as they are.
        """
        if MIX not in batch:
            return batch
        rows = {name: x for name, x in batch.items() if name not in (MIX, "other_image")}
        weight = self._weight_of_pixels(batch[MIX], batch["image"].shape)
        mixed = weight * batch["image"] + (1 - weight) * batch["other_image"]
        return rows | {"image": mixed, "share": weight.mean(tuple(range(1, weight.ndim)))}

    def _weight_of_pixels(self, how: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The weight of the first image at each pixel; `(b, 1, ...)` if it is the same at all."""
        is_cut, everywhere = (x.reshape(-1, *[1] * (len(shape) - 1)) for x in how.T[:2])
        if self.cutmix is None:
            return everywhere
        weight, y, x = how.T[1:]
        height, width = shape[1:3]
        side = namespace_of(how).sqrt(1 - weight)
        in_box = _inside(y, side, height)[:, :, None] & _inside(x, side, width)[:, None, :]
        outside = (~in_box).astype(np.float32).reshape(*in_box.shape, *[1] * (len(shape) - 3))
        return namespace_of(how).where(is_cut > 0, outside, everywhere)


def _inside(centre: np.ndarray, side: np.ndarray, num_pixels: int) -> np.ndarray:
    """Whether a row or column of pixels is in a box with this centre and side, `(b, num_pixels)`.

    Args:
      centre: Centre of the box, from 0 to 1, `(b,)`.
      side: Length of the box, from 0 to 1, `(b,)`.
      num_pixels: Number of rows or columns.
    """
    places = (np.arange(num_pixels, dtype=np.float32)[None] + 0.5) / num_pixels
    return abs(places - centre[:, None]) < side[:, None] / 2
