"""The transforms of a job: those that its config lists, or those of its data set."""

from jddp.config.schema import Config
from jddp.data import DataSource
from jddp.data.image_transforms import TRANSFORMS, Normalize
from jddp.data.transforms import Transform
from jddp.errors import ConfigError
from jddp.names import check_arguments, look_up


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
    if not listed or source is None or not source.spec:
        return
    name = config.data.name or config.data.target
    if "image" not in source.spec:
        raise ConfigError(
            f"data.transforms change images, and {name} has {', '.join(source.spec)}. Set it to []."
        )
    dtype = source.spec["image"][1]
    if dtype.kind == "f" and any(isinstance(x, Normalize) for x in listed):
        raise ConfigError(
            "data.transforms lists normalize, which divides bytes by 255, but the images of "
            f"{name} are {dtype} numbers, normalized already. Leave it out; images of files have "
            "data.kwargs.mean and data.kwargs.std."
        )


def training_transforms(config: Config, source: DataSource) -> tuple[Transform, ...]:
    """The transforms of training rows: those of the data set, unless the config lists others."""
    return source.augment if config.data.transforms is None else listed_transforms(config)
