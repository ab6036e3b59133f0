"""Reads config files and overrides, merges them in order, and names the source of each mistake.

    config, name = load_config(["base.yaml", "small.yaml"], ["train.num_steps=10"])

Files come first, in order, then the command line; the later value wins. Naming another model (or
data set, loss, optimizer, schedule, hook) also drops the arguments that were meant for the first
one, and `num_steps` replaces an earlier `num_epochs`. OmegaConf reads and merges, for YAML read by
PyYAML alone takes `1e-3` for a string.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jddp.config.keys import REMOVED, ConfigMistakes, Mistake
from jddp.config.options import DdpConfig, WordedSection
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.ground.files import expand
from jddp.ground.names import did_you_mean
from jddp.ground.typing import JsonObject, Settings

log = logging.getLogger("jddp")

DEFAULT_PRESET = "fashion_mnist_cnn"
# A wheel carries the presets inside the package, a checkout next to it.
PRESETS = [folder / "configs" for folder in Path(__file__).parents[1:3]]
OWN = ("model", "data", "loss")  # sections whose target makes a job yours; the first names it
NO_OVERRIDE = "not of the form key.path=value, e.g. train.num_steps=100"
NOT_READABLE = (ConfigError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException)
# Sections for which a word may stand: `ddp.strategy=zero1`.
WORDED = {
    f"ddp.{name}": field.annotation
    for name, field in DdpConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, WordedSection)
}
# A section, its keys that exclude each other, and the keys that depend on them. A later source that
# sets one of these keys drops all that earlier sources set. A function for evaluation depends on
# its loss, and all keys of a section depend on its word; `ddp.reduction` is the exception.
NAMED = ("data", "model", "optimizer", "optimizer.schedule", "ddp.reduction.hook")
RIVALS: list[tuple[str, Sequence[str], Iterable[str]]] = [
    *((section, ("name", "target"), ("kwargs",)) for section in NAMED),
    ("loss", ("name", "target"), ("kwargs", "eval_target")),
    ("train", ("num_steps", "num_epochs"), ()),
    *((x, [kind.WORD], kind.model_fields) for x, kind in WORDED.items() if x != "ddp.reduction"),
]


class Layer(NamedTuple):
    """The values of one source, and its name in an error."""

    origin: str
    values: JsonObject


def load_config(
    files: Sequence[str] = (), overrides: Sequence[str] | Settings = ()
) -> tuple[Config, str]:
    """Returns the config that files and overrides give, and its name.

    Args:
      files: YAML files or names of presets. If there are none: the default preset; or, where
        `overrides` name a target of a model, data or loss, the schema's defaults and one epoch.
      overrides: `key.path=value` as on the command line, or a mapping of dotted keys.

    Returns:
      The config, in which `run.dir` is set, and its name: the files' stems joined by "+", or the
      target's name.

    Raises:
      ConfigError: With every mistake, one line each, and the source in which it stands.
    """
    given = nested(overrides)
    targets = [target for section in OWN if (target := _at(given, (section, "target")))]
    if targets and not files:  # No preset was tuned for your own job.
        layers = [Layer("the schema's defaults", {"train": {"num_epochs": 1}})]
        name = str(targets[0]).rpartition(":")[2]
    else:
        paths = [find_config(file) for file in files or [DEFAULT_PRESET]]
        layers = [Layer(origin, read_yaml(path, origin)) for origin, path in paths]
        name = "+".join(path.stem for _, path in paths)
    config = _merge([*layers, Layer("command line", given)])
    if config.run.dir is None:
        config = with_overrides(config, {"run.dir": f"runs/{name}"})
    return config, name


def with_overrides(config: Config, overrides: Sequence[str] | Settings) -> Config:
    """Returns a copy of `config` in which dotted keys (or nested sections) are replaced.

    Raises:
      ConfigError: As `load_config`.
    """
    return _merge([Layer("config", config.model_dump()), Layer("overrides", nested(overrides))])


def dump_values(values: Settings) -> str:
    """Returns nested values, e.g. `config.model_dump()`, as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def read_yaml(path: Path, origin: str | None = None) -> JsonObject:
    """Returns the values of a YAML file as they stand there: no `${...}` is followed.

    Args:
      path: The file.
      origin: Name of the file in an error; its path by default.

    Raises:
      ConfigError: If it cannot be read, has aliases, or holds no sections of keys.
    """
    try:
        _refuse_aliases(path.read_text(encoding="utf-8"))
        return _without_removed(_plain(OmegaConf.load(path)))
    except (OSError, *NOT_READABLE) as error:
        raise ConfigError(f"{origin or path}: cannot be read: {_one_line(error)}") from error


def _without_removed(values: JsonObject, *, every: bool = False) -> JsonObject:
    """Values without removed keys at their defaults, or without all of them, with a line for each.

    The config of an earlier run has them all.
    """
    for key, default in REMOVED.items():
        *above, name = key.split(".")
        section = _at(values, above)
        if isinstance(section, dict) and name in section and (every or section[name] == default):
            if section[name] != default:
                log.warning("%s=%s is no key any more, and is ignored.", key, section[name])
            del section[name]
    return values


def read_stored(path: Path) -> Config:
    """The config of a run, which an earlier version may have written.

    Raises:
      ConfigError: If it cannot be read, or has a mistake.
    """
    return Config(**_without_removed(read_yaml(path), every=True))


def _refuse_aliases(text: str) -> None:
    """Refuses YAML with aliases, of which a few lines could stand for endless values."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ConfigError("aliases (*name) are not read: repeat a key with ${key.path}")


def find_config(name: str) -> tuple[str, Path]:
    """Returns the name of a config in errors, and its file, from a path or the name of a preset.

    Raises:
      ConfigError: If there is neither such a file nor such a preset.
    """
    if (path := expand(name)).is_file():
        return name, path
    if path.is_dir():
        raise ConfigError(
            f"--config {name}: is a directory. Name its config.yaml; a run of jddp.fit has "
            "none: jddp.open_run(directory, model=...) and jddp checkpoint read it."
        )
    presets = {path.stem: path for folder in PRESETS for path in sorted(folder.glob("*.yaml"))}
    if name in presets:
        return f"preset {name}", presets[name]
    meant = did_you_mean(Path(name).stem, list(presets)) or f" Presets: {', '.join(presets)}."
    raise ConfigError(f"--config {name}: no such file or preset.{meant}")


def _no_override(word: str) -> str:
    with contextlib.suppress(ConfigError):
        find_config(word)
        return f"not of the form key.path=value. Did you mean '--config {word}'?"
    return NO_OVERRIDE


def nested(overrides: Sequence[str] | Settings) -> JsonObject:
    """Returns values by dotted keys, or words `key.path=value`, as nested values.

    Raises:
      ConfigError: If a word or a value cannot be read, all of them at once.
    """
    values = OmegaConf.create()
    mistakes = []
    for override in overrides:
        key, equals, value = override.partition("=")
        try:
            if isinstance(overrides, Mapping):
                spelled = _spelled_out(override, overrides[override])
                OmegaConf.update(values, override, spelled, force_add=True)
            elif equals and all(key.split(".")):
                alone = _plain(OmegaConf.from_dotlist([f"{key}={value}"]))
                values.merge_with(_spelled_out("", alone))
            else:
                raise ConfigError(_no_override(override))
        except (*NOT_READABLE, IndexError) as error:
            # An IndexError is OmegaConf's, of a key such as "[a".
            reason = NO_OVERRIDE if isinstance(error, IndexError) else _one_line(error)
            shown = override if len(override) <= 80 else f"{override[:77]}..."
            mistakes.append(Mistake((), f"command line: {shown!r}: {reason}"))
    if mistakes:
        raise ConfigMistakes(mistakes)
    return _plain(values)


def _spelled_out(key: str, value: object) -> Any:
    """The value of a key, with each word replaced by the section for which it stands."""
    if isinstance(value, str) and key in WORDED:
        return WORDED[key].of_word(value)
    if isinstance(value, dict):
        above = f"{key}." if key else ""
        return {name: _spelled_out(f"{above}{name}", x) for name, x in value.items()}
    return value


def _merge(layers: Sequence[Layer]) -> Config:
    merged: JsonObject = {}
    layers = [x._replace(values=_spelled_out("", x.values)) for x in layers]
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


def _drop_rivals(earlier: JsonObject, later: JsonObject) -> None:
    """Removes the keys from `earlier` that a choice in `later` replaces."""
    for section, rivals, beside in RIVALS:
        before, after = _at(earlier, section.split(".")), _at(later, section.split("."))
        if isinstance(before, dict) and isinstance(after, dict):
            chosen = {key: after[key] for key in rivals if after.get(key) is not None}
            if any(before.get(key) != value for key, value in chosen.items()):
                for key in (*rivals, *beside):
                    before.pop(key, None)


def _origin(path: Sequence[str], layers: Sequence[Layer]) -> str:
    """Returns the last source that set the key at `path`, or the nearest section above it."""
    places = (path[:length] for length in range(len(path), 0, -1))
    found = (x.origin for at in places for x in reversed(layers) if _at(x.values, at) is not None)
    return next(found, layers[0].origin)


def _at(values: object, path: Sequence[str]) -> object:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _plain(values: object) -> JsonObject:
    """Returns nested dicts in which interpolations are still text."""
    plain: object = OmegaConf.to_container(values, resolve=False)
    if not isinstance(plain, dict):
        raise ConfigError(f"a config holds sections of keys, not {plain!r}")
    return plain


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def flatten(values: Settings, above: str = "") -> JsonObject:
    """Nested values by their dotted keys; tuples become lists, as YAML gives them back."""
    flat: JsonObject = {}
    for name, value in values.items():
        key = f"{above}{name}"
        value = list(value) if isinstance(value, tuple) else value
        flat |= flatten(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat
