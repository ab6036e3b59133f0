"""The public surface: names, signatures, keys, commands with their options, and exit codes.

python -m golden.surface    # as JSON; in a process of its own, since other imports add members
"""

import argparse
import contextlib
import inspect
import json
import sys
from unittest import mock

import jddp
import jddp.data
from jddp.__main__ import COMMANDS, main
from jddp.config.keys import keys_of
from jddp.config.schema import Config
from jddp.ground.errors import ExitCode


def public():
    """Each public name with its value; names of `jddp.data` begin with "data."."""
    data = {x: y for x, y in vars(jddp.data).items() if x[0] != "_" and not inspect.ismodule(y)}
    found = {name: getattr(jddp, name) for name in jddp.__all__}
    return found | {f"data.{name}": data[name] for name in sorted(data)}


def names():
    """Each public name with its signature, and the public members of classes with theirs."""
    found = {}
    for name, value in public().items():
        found[name] = signature(value)
        if inspect.isclass(value):
            for member in sorted({**vars(value), **getattr(value, "__annotations__", {})}):
                if not member.startswith("_"):
                    found[f"{name}.{member}"] = signature(vars(value).get(member))
    return found


def signature(value):
    """The signature of a function or class; "" of other values."""
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not callable(value):
        return ""
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    return str(found.replace(parameters=[plain(x) for x in found.parameters.values()]))


PLAIN = {type(None), bool, int, float, str, tuple, list, type(inspect.Parameter.empty)}


def plain(parameter):
    """A parameter without what inspect shows by an address: objects and functions."""
    if type(parameter.default) not in PLAIN:
        parameter = parameter.replace(default=...)
    if "<" in inspect.formatannotation(parameter.annotation):
        parameter = parameter.replace(annotation=parameter.empty)
    return parameter


def keys():
    """Each key of a config with its default."""
    return {
        ".".join(path): repr(field.get_default(call_default_factory=True))
        for path, field in keys_of(Config).items()
    }


def options(command):
    """The options of a command, as its parser has them."""
    found = set()
    add = argparse._ActionsContainer.add_argument

    def noted(self, *flags, **about):
        found.update(flag for flag in flags if flag.startswith("--"))
        return add(self, *flags, **about)

    with (
        mock.patch.object(argparse._ActionsContainer, "add_argument", noted),
        contextlib.redirect_stdout(sys.stderr),
        contextlib.suppress(SystemExit),
    ):
        main([command, "--help"])
    return sorted(found)


def surface():
    """All of it, as values of JSON."""
    return {
        "names": names(),
        "keys": keys(),
        "commands": {name: options(name) for name in COMMANDS},
        "exit codes": {code.name: code.value for code in ExitCode},
    }


if __name__ == "__main__":
    print(json.dumps(surface()))
