"""Names that users type: suggestions for mistyped ones, the objects they name, their arguments.

A config gives models, losses, optimizers and their arguments by name. Here a mistyped name gets a
suggestion, `package.module:Name` becomes the object it names, and arguments are checked against a
signature before anything is called.

    resolve_target("my_models:Net", key="model.target")
    check_arguments(optax.adamw, {"b3": 0.9}, key="optimizer.kwargs")  # ConfigError: ... 'b2'?
    match_paths(["backbone/.*"], paths, key="ddp.frozen")
    direction_of("val_accuracy")    # "max"; None for "score": its user has to say

Resolving a target imports the module it names, which runs that module's code: a config that is
named on the command line is trusted like a program. No config key is known here. `synonyms` has the
names that other trainers have for options.

    [project.entry-points."jddp.commands"]     # `jddp report`: a function of the arguments
    report = "jddp.workbench.report:main"
    [project.entry-points."jddp.options"]      # `jddp train --sweep`: the function behind it
    sweep = "jddp.workbench.sweep:run_sweep"
    [project.entry-points."jddp.callbacks"]    # `callbacks: [{name: sample_text}]` of a config
    [project.entry-points."jddp.sinks"]        # `report.sinks=[wandb]`: a class with the attribute
                                               # `package`, made with a `Start`
    [project.entry-points."jddp.run_ended"]    # called at the end of a run with its directory and
                                               # name; returns files for it, {name: content}

`jddp.workbench` is found in this way only, as any other package is. `jddp.DataParallel` also finds
the reader of weights in this way: it needs no checkpoints to train.
"""

import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ParamSpec, TypeVar

from jddp.ground.errors import ConfigError, UsageError, check_choice

P = ParamSpec("P")
Returned = TypeVar("Returned")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def few(names: Sequence[object]) -> str:
    """Returns three names at most, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """Returns the sentence " Did you mean 'x'?" for the nearest known name, or nothing.

    Upper and lower case are equal, and a name that stands inside a known one (`cosine` in
    `cosine_decay_schedule`) counts as near, the shortest first; so does its abbreviation, by
    initials (`lr` for `learning_rate`) or by leaving out letters (`ckpt`). The keys of a mapping
    are compared, and a value is suggested.
    """
    words = known if isinstance(known, Mapping) else {word: word for word in sorted(known)}
    typed = name.lower()
    lowered = {key.lower(): word for key, word in words.items()}
    near = (
        difflib.get_close_matches(typed, lowered, n=1)
        or sorted((w for w in lowered if typed in w), key=len)
        or [w for w in lowered if typed in "".join(part[:1] for part in w.split("_"))]
        or [w for w in lowered if re.match(".*".join(map(re.escape, typed)), w)]
    )
    return f" Did you mean {lowered[near[0]]!r}?" if near and typed else ""


def look_up(name: str, known: Mapping[str, object], *, key: str, kind: str) -> Any:
    """Returns the object that a registered name stands for.

    Args:
      name: The name.
      known: Objects by name.
      key: The config key that holds the name, for the error.
      kind: Word for such an object in the error.

    Raises:
      ConfigError: If it is not known.
    """
    if name not in known:
        meant = did_you_mean(name, known.keys())
        listed = ", ".join(sorted(known))
        raise ConfigError(f"{key}: no {kind} {name!r}.{meant} Known: {listed}.")
    return known[name]


def named(section: Any, key: str, known: Mapping[str, object] | None = None, kind: str = "") -> Any:
    """Returns the object that a section of a config names, by its target or its name.

    Args:
      section: Object with `name` and `target`, one of them None.
      key: The config key of the section, for the error.
      known: Objects by name; None returns a name as it is.
      kind: Word for such an object in the error.

    Raises:
      ConfigError: If the name is not known, or the target cannot be imported.
    """
    if section.target is not None:
        return resolve_target(section.target, key=f"{key}.target")
    if known is None:
        return section.name
    return look_up(section.name or "", known, key=f"{key}.name", kind=kind)


def resolve_target(target: str, *, key: str) -> Any:
    """Returns the object that `package.module:Name` names; it may be in the current directory.

    Args:
      target: A module and, after a colon, a name in it (dots reach further inside).
      key: The config key that holds the target, for the error.

    Raises:
      ConfigError: If the module cannot be imported or has no such name.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        meant = did_you_mean(target, [":".join(target.rsplit(".", 1))]) if "." in target else ""
        raise ConfigError(f"{key}: {target!r} is not of the form package.module:Name.{meant}")
    if not {"", "."} & set(sys.path):
        # A console script does not look in the current directory, unlike `python -m`.
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # Your module may raise anything; it becomes one line.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{key}: cannot import {module_name!r}: {reason}") from error
    return find_attribute(found, name, called=f"module {module_name!r}", key=key)


def find_attribute(owner: object, name: str, *, called: str, key: str, ending: str = "") -> Any:
    """Returns `owner.name`, where `name` may be dotted and `owner` is a module or a class.

    Args:
      owner: Module or class.
      name: Dotted name of an attribute.
      called: Name of the owner for the error.
      key: The config key that holds the name, for the error.
      ending: Ending of the names that are suggested.

    Raises:
      ConfigError: If there is no such name.
    """
    for part in name.split("."):
        if not hasattr(owner, part):
            names = [x for x in dir(owner) if x.endswith(ending) and not x.startswith("_")]
            meant = did_you_mean(part, names)
            raise ConfigError(f"{key}: {called} has no {part!r}.{meant}")
        owner = getattr(owner, part)
    return owner


def accepted_names(function: object, *, key: str) -> set[str]:
    """Returns the names of the arguments that `function` takes by keyword.

    Raises:
      ConfigError: If it is not callable.
    """
    if not callable(function):
        raise ConfigError(f"{key} names {function!r}, which cannot be called.")
    kinds = (*VARIADIC, inspect.Parameter.POSITIONAL_ONLY)
    return {p.name for p in _parameters(function) if p.kind not in kinds}


def defaults_of(function: object) -> dict[str, object]:
    """Returns the default of each argument of `function`, by name; `empty` where there is none."""
    return {p.name: p.default for p in _parameters(function)} if callable(function) else {}


def check_arguments(
    function: object, arguments: Mapping[str, object], *, key: str, filled: Collection[str] = ()
) -> None:
    """Checks keyword arguments against the signature of `function`, without calling it.

    Args:
      function: Function that will be called.
      arguments: Arguments of the config.
      key: The config key under which they stand, for the error.
      filled: Names of arguments that the caller fills in itself.

    Raises:
      ConfigError: For the first argument that the function does not take, or lacks.
    """
    accepted_names(function, key=key)
    called = name_of_callable(function)
    parameters = _parameters(function)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        refuse_unknown(function, arguments, key=key)
    for parameter in parameters:
        name = parameter.name
        is_given = name in arguments or name in filled or parameter.kind in VARIADIC
        if parameter.default is parameter.empty and not is_given:
            raise ConfigError(f"{key}.{name} is missing: {called} needs the argument {name!r}.")


def refuses_unknown(
    called: str, synonyms: Mapping[str, str]
) -> Callable[[Callable[P, Returned]], Callable[P, Returned]]:
    """Makes a function refuse an unknown argument in one line, with a suggestion.

    Args:
      called: Name of the function, for the error.
      synonyms: Arguments by the names that others have for them.

    Returns:
      A decorator; type checkers see the signature of the function itself.
    """

    def decorate(function: Callable[P, Returned]) -> Callable[P, Returned]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Returned:
            refuse_unknown(function, kwargs, key=called, synonyms=synonyms, called=called)
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse_unknown(
    function: object,
    arguments: Iterable[str],
    *,
    key: str,
    synonyms: Mapping[str, str] | None = None,
    called: str | None = None,
) -> None:
    """Refuses arguments that `function` does not have, and suggests a name.

    Args:
      function: Function that will be called.
      arguments: Names of the arguments that were given.
      key: The function, or the config key under which they stand, for the error.
      synonyms: Arguments by the names that others have for them.
      called: Name of the function, for the error; by default its own.

    Raises:
      ConfigError: For the first unknown argument, with the nearest name.
    """
    known = accepted_names(function, key=key)
    words = {**(synonyms or {}), **{name: name for name in known}}
    for name in arguments:
        if name not in known:
            meant = did_you_mean(name, words)
            takes = called or name_of_callable(function)
            raise ConfigError(f"{key}.{name}: {takes} takes no argument {name!r}.{meant}")


def name_of_callable(function: object) -> str:
    """Returns the name of a function, a class or a `functools.partial` of one."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)


def _parameters(function: Any) -> list[inspect.Parameter]:
    if isinstance(function, type):  # A metaclass, such as NNX's, hides the arguments of `__init__`.
        return _parameters(inspect.getattr_static(function, "__init__"))[1:]
    return list(inspect.signature(function).parameters.values())


MODES = ("auto", "max", "min")
_WORDS = {
    "max": "acc accuracy auc auroc bleu f1 iou precision r2 recall reward",
    "min": "byte error loss mae mse nll perplexity ppl rmse wer",  # "byte" as in bits_per_byte
}
DIRECTIONS = {word: mode for mode, words in _WORDS.items() for word in words.split()}
# Words in names that show no direction, such as neg_mean_squared_error.
_OTHER = {"delta", "minus", "neg", "negative", "num", "std", "var"}


def direction_of(metric: str) -> str | None:
    """Returns "max" or "min", the better direction of a metric; None if its name shows neither.

    Args:
      metric: Name of the metric.
    """
    words = re.findall("[a-z][a-z0-9]*", metric.lower())
    if not words or not _OTHER.isdisjoint(words):
        return None
    last = words[-1]
    return DIRECTIONS.get(last) or DIRECTIONS.get(last.rstrip("0123456789"))


def choose_mode(metric: str, mode: str, *, key: str) -> str:
    """Returns "max" or "min": the mode, or under "auto" the direction of the metric.

    Args:
      metric: Name of the metric.
      mode: One of `MODES`.
      key: Name of the argument or key that sets the mode, for an error.

    Raises:
      ConfigError: If the mode is unknown, or is "auto" and the name of the metric has no direction.
    """
    check_choice(key, mode, MODES)
    chosen = direction_of(metric) if mode == "auto" else mode
    if chosen is None:
        raise ConfigError(
            f"{key} 'auto': the name {metric!r} does not show whether larger or smaller is better. "
            f"Set {key} to 'max' or 'min'."
        )
    return chosen


def match_paths(patterns: Iterable[str], paths: Collection[str], *, key: str) -> set[str]:
    """Returns the paths that a pattern matches.

    Args:
      patterns: Regular expressions, each for whole paths.
      paths: Paths of the parameters, such as "backbone/Dense_0/kernel".
      key: Name of the option or config key that holds the patterns, for the error.

    Raises:
      ConfigError: If a pattern is no regular expression, or matches no path. The message then has
        the nearest paths.
    """
    matches = set[str]()
    for pattern in patterns:
        try:
            found = {path for path in paths if re.fullmatch(pattern, path)}
        except re.error as error:
            raise ConfigError(f"{key}: {pattern!r} is no regular expression: {error}.") from error
        if not found:
            nearest = ", ".join(map(repr, difflib.get_close_matches(pattern, paths, cutoff=0)))
            raise ConfigError(
                f"{key}: {pattern!r} matches no whole path of a parameter. The nearest are "
                f"{nearest}."
            )
        matches |= found
    return matches


Function = Callable[..., Any]
COMMANDS, OPTIONS = "jddp.commands", "jddp.options"
ADDED_CALLBACKS, RUN_ENDED, SINKS = "jddp.callbacks", "jddp.run_ended", "jddp.sinks"


def added(group: str) -> Iterator[tuple[str, Function]]:
    """Imports the functions that packages add to a group, and yields each with its name."""
    for point in entry_points(group=group):
        if (function := _loaded(point)) is not None:
            yield point.name, function


def find(group: str, name: str) -> Function | None:
    """Imports the function that a package adds under a name; None if no package adds one."""
    found = map(_loaded, entry_points(group=group, name=name))
    return next(filter(None, found), None)


def _loaded(point: EntryPoint) -> Function | None:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if error.name and f"{point.module}.".startswith(f"{error.name}."):
            return None  # A package that was removed is still listed by its installation.
        raise


def tool(name: str, asked: str = "", package: str = "jddp.workbench") -> Function:
    """Imports the function behind an option.

    Args:
      name: Name of its entry point.
      asked: The option as its user knows it; by default `--name`.
      package: The package that names the entry point.

    Raises:
      UsageError: If its package is not installed.
    """
    if (found := find(OPTIONS, name)) is None:
        raise UsageError(
            f"{asked or f'--{name}'} needs {package}, which is not installed here. Install the "
            "whole package jddp."
        )
    return found
