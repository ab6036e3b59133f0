"""The transforms of a job: those that its config lists, or those of its data set."""

from collections.abc import Mapping, Sequence

import numpy as np

from jddp.config.schema import Config
from jddp.data import DataSource
from jddp.data.transforms import LARGEST, TRANSFORMS, Chain, Normalize, Transform
from jddp.engine.host_rows import as_arrays
from jddp.errors import ConfigError
from jddp.names import check_arguments, look_up
from jddp.typing import TRANSFORM, Batch


def listed_transforms(config: Config) -> tuple[Transform, ...]:
    """The transforms that a config lists.

    Raises:
      ConfigError: If a name or an argument is unknown.
    """
    found = []
    for i, section in enumerate(config.data.transforms or ()):
        key = f"data.transforms[{i}]"
        make = look_up(section.name, TRANSFORMS, key=f"{key}.name", kind="transform")
        check_arguments(make, section.kwargs, key=f"{key}.kwargs")
        found.append(make(**section.kwargs))
    return tuple(found)


def check_listed(config: Config, source: DataSource | None) -> None:
    """Refuses transforms that the data of a config cannot take.

    Args:
      config: Config of the job.
      source: Source of the data; None if it could not be made.

    Raises:
      ConfigError: If a name or an argument is unknown, the data have no images, or their images
        would be normalized twice.
    """
    listed = listed_transforms(config)
    if listed and source is not None and source.open_streams is None:
        dtypes = {name: dtype for name, (_, dtype) in source.spec.items()}
        _check_rows(config.data.name or str(config.data.target), dtypes, listed)


def _check_rows(name: str, dtypes: Mapping[str, np.dtype], listed: Sequence[Transform]) -> None:
    if "image" not in dtypes:
        raise ConfigError(
            f"data.transforms change images, and {name} has {', '.join(dtypes)}. Set it to []."
        )
    dtype = dtypes["image"]
    if dtype.name not in LARGEST and any(isinstance(x, Normalize) for x in listed):
        raise ConfigError(
            "data.transforms lists normalize, which divides uint8 by 255 and uint16 by 65,535, but "
            f"images of {name} are {dtype} numbers. Leave it out, or store unscaled images as "
            "uint8 or uint16; images of files have data.kwargs.mean and data.kwargs.std."
        )


def training_transforms(config: Config, source: DataSource) -> tuple[Transform, ...]:
    """The transforms of training rows: those of the data set, unless the config lists others."""
    return source.augment if config.data.transforms is None else listed_transforms(config)


def note_on_bytes(config: Config, dtype: np.dtype | None) -> str:
    """A note that nothing scales the images that a model of jddp gets; empty if that is not so.

    Args:
      config: Config of the job.
      dtype: Dtype of the images, after the fixed transforms of the data set; None without images.
    """
    scales = any(isinstance(x, Normalize) for x in listed_transforms(config))
    if config.model.name is None or dtype is None or dtype.name not in LARGEST or scales:
        return ""
    return (
        f"data: the images are {dtype} from 0 to {LARGEST[dtype.name]:,}, and model.name="
        f"{config.model.name} does not scale them. Set data.transforms=[{{name: normalize}}], with "
        "mean and std in its kwargs."
    )


class OfStream:
    """The transforms that a config lists, as a function of each batch of a stream.

    Raises:
      ConfigError: If one needs random numbers, which are those of numbered examples.
    """

    def __init__(self, config: Config) -> None:
        self._chain = Chain(listed_transforms(config))
        self._on_device = config.data.transform_on == "device"
        for i, transform in enumerate(self._chain.transforms):
            if transform.num_draws:
                raise ConfigError(
                    f"data.transforms[{i}] needs random numbers of each example, and the examples "
                    "of a stream have no numbers. Transform rows in the stream."
                )

    def __call__(self, batch: Batch) -> Batch:
        """The changed rows; or the rows, and the function that the step calls first.

        Raises:
          ConfigError: If there are no images, or they would be normalized twice.
        """
        if not self._chain.transforms:
            return batch
        rows = as_arrays(batch)
        named = rows if isinstance(rows, Mapping) else {}
        dtypes = {name: x.dtype for name, x in named.items()}
        _check_rows("the stream", dtypes, self._chain.transforms)
        return {**rows, TRANSFORM: self._chain} if self._on_device else self._chain(rows)
