"""Read config files and overrides, merge them in order, and say where each mistake was made.

    config, name = load_config(["base.yaml", "small.yaml"], ["train.num_steps=10"])

Files come first, in order, then the command line; what comes later wins. Naming another model (or
data set, loss, optimizer, schedule, hook) also drops the arguments that were meant for the first
one, and `num_steps` replaces an earlier `num_epochs`. OmegaConf reads and merges, for YAML read by
PyYAML alone takes `1e-3` for a string.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jddp.config.mistakes import ConfigMistakes, Mistake
from jddp.config.schema import Config
from jddp.errors import ConfigError
from jddp.names import did_you_mean

DEFAULT_PRESET = "fashion_mnist_cnn"
# A wheel carries the presets inside the package, a checkout beside it.
PRESETS = [folder / "configs" for folder in Path(__file__).parents[1:3]]
MOST_VALUES = 10_000  # of a config: aliases of aliases make few lines endless
# Which keys go together: setting one of them in a later source drops the others from earlier ones.
RIVALS = {
    **{
        section: (("name", "target"), ("name", "target", "kwargs"))
        for section in ("data", "model", "loss", "optimizer", "optimizer.schedule", "ddp.comm_hook")
    },
    "train": (("num_steps", "num_epochs"), ("num_steps", "num_epochs")),
}


class Layer(NamedTuple):
    """The values of one source, and what to call it in an error."""

    origin: str
    values: dict[str, Any]


def load_config(
    files: Sequence[str] = (), overrides: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[Config, str]:
    """Returns the config that files and overrides give, and its name.

    Args:
      files: YAML files or names of presets; the default preset if there are none.
      overrides: `key.path=value` as on the command line, or a mapping of dotted keys.

    Returns:
      The config, in which `run.dir` is set, and its name: the files' stems joined by "+".

    Raises:
      ConfigError: With every mistake, one line each, and the source in which it stands.
    """
    paths = [find_config(file) for file in files or [DEFAULT_PRESET]]
    layers = [Layer(origin, read_values(path, origin)) for origin, path in paths]
    name = "+".join(path.stem for _, path in paths)
    config = _merge([*layers, Layer("command line", _parse(overrides))])
    if config.run.dir is None:
        config = with_overrides(config, {"run.dir": f"runs/{name}"})
    return config, name


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Returns a copy of `config` in which dotted keys (or nested sections) are replaced.

    Raises:
      ConfigError: As `load_config`.
    """
    layers = [Layer("config", config.model_dump()), Layer("overrides", _parse(overrides))]
    return _merge(layers)


def dump_values(values: Mapping[str, Any]) -> str:
    """Returns nested values, e.g. `config.model_dump()`, as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def read_values(path: Path, origin: str | None = None) -> dict[str, Any]:
    """Returns the values of a YAML file as they stand there: no `${...}` is followed.

    Args:
      path: The file.
      origin: What to call it in an error, if not by its path.

    Raises:
      ConfigError: If it cannot be read, holds no sections of keys, or more of them than a config
        can need.
    """
    try:
        _refuse_more_than_a_config_needs(path.read_text())
        return _plain(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, ConfigError) as error:
        raise ConfigError(f"{origin or path}: cannot be read: {_one_line(error)}") from error


def _refuse_more_than_a_config_needs(text: str) -> None:
    """Counts values as they will be once aliases (`*name`) are replaced by what they stand for."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = MOST_VALUES  # a node that holds itself has no end
            pairs = node.value if isinstance(node, yaml.SequenceNode) else sum(node.value, ())
            sizes[id(node)] = 1 + sum(map(size, pairs))
        return sizes[id(node)]

    try:
        is_too_much = size(yaml.compose(text, yaml.SafeLoader)) > MOST_VALUES
    except RecursionError:
        is_too_much = True
    if is_too_much:
        raise ConfigError(f"it holds more than {MOST_VALUES:,} values, or too deep ones")


def find_config(name: str) -> tuple[str, Path]:
    """Returns what to call a config in errors, and its file: a file's path or a preset's name.

    Raises:
      ConfigError: If there is neither such a file nor such a preset.
    """
    if Path(name).is_file():
        return name, Path(name)
    presets = {path.stem: path for folder in PRESETS for path in sorted(folder.glob("*.yaml"))}
    if name in presets:
        return f"preset {name}", presets[name]
    meant = did_you_mean(Path(name).stem, list(presets)) or f" Presets: {', '.join(presets)}."
    raise ConfigError(f"--config {name}: no such file or preset.{meant}")


def _parse(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    values, mistakes = OmegaConf.create(), []
    for override in overrides:
        key, equals, _ = override.partition("=")
        try:
            if isinstance(overrides, Mapping):
                OmegaConf.update(values, key, overrides[key], force_add=True)
            elif equals and all(key.split(".")):
                values.merge_with_dotlist([override])
            else:
                raise ConfigError("not of the form key.path=value, e.g. train.num_steps=100")
        except (ConfigError, YAMLError, OmegaConfBaseException) as error:
            mistakes.append(Mistake((), f"command line: {override!r}: {_one_line(error)}"))
    if mistakes:
        raise ConfigMistakes(mistakes)
    return _plain(values)


def _merge(layers: Sequence[Layer]) -> Config:
    merged: dict[str, Any] = {}
    for layer in layers:
        _drop_rivals(merged, layer.values)
        merged = _plain(OmegaConf.merge(merged, layer.values))
    try:
        values: Any = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:  # An interpolation, ${...}, that leads nowhere.
        raise ConfigError(f"{layers[0].origin}: {_one_line(error)}") from error
    try:
        return Config(**{str(key): value for key, value in values.items()})
    except ConfigMistakes as error:
        lines = [m._replace(text=f"{_origin(m.path, layers)}: {m.text}") for m in error.mistakes]
        raise ConfigMistakes(lines) from None


def _drop_rivals(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    """Removes from `earlier` what a choice made in `later` stands in place of."""
    for section, (choices, dropped) in RIVALS.items():
        before, after = _at(earlier, section.split(".")), _at(later, section.split("."))
        if isinstance(before, dict) and isinstance(after, dict):
            chosen = {key: after[key] for key in choices if after.get(key) is not None}
            if chosen and any(before.get(key) != value for key, value in chosen.items()):
                for key in dropped:
                    before.pop(key, None)


def _origin(path: Sequence[str], layers: Sequence[Layer]) -> str:
    """Returns the last source that set the key at `path`, or the nearest section above it."""
    for length in range(len(path), 0, -1):
        for layer in reversed(layers):
            if _at(layer.values, path[:length]) is not None:
                return layer.origin
    return layers[0].origin


def _at(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _plain(values: Any) -> dict[str, Any]:
    """Returns nested dicts in which interpolations are still text."""
    plain: Any = OmegaConf.to_container(values, resolve=False)
    if not isinstance(plain, dict):
        raise ConfigError(f"a config holds sections of keys, not {plain!r}")
    return cast(dict[str, Any], plain)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys; tuples become lists, as YAML gives them back."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        value = list(value) if isinstance(value, tuple) else value
        flat |= flatten(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat
