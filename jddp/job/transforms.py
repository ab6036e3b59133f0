"""The transforms of a job: those that its config lists, or those of its data set."""

from jddp.config.schema import Config
from jddp.data import DataSource
from jddp.data.image_transforms import TRANSFORMS
from jddp.data.transforms import Transform
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


def training_transforms(config: Config, source: DataSource) -> tuple[Transform, ...]:
    """The transforms of training rows: those of the data set, unless the config lists others."""
    return source.augment if config.data.transforms is None else listed_transforms(config)
