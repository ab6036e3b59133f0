"""The public surface: names, signatures, keys, commands with their options, and exit codes.

python -m golden.surface    # as JSON; in a process of its own, since other imports add members
"""

import argparse
import contextlib
import inspect
import json
import re
import sys
from unittest import mock

import jddp
from jddp.__main__ import COMMANDS, main
from jddp.config.keys import keys_of
from jddp.config.schema import Config
from jddp.ground.errors import ExitCode

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def names():
    """Each public name with its signature, and the public members of classes with theirs."""
    found = {}
    for name in jddp.__all__:
        value = getattr(jddp, name)
        found[name] = signature(value)
        if inspect.isclass(value):
            members = {**vars(value), **getattr(value, "__annotations__", {})}
            for member in sorted(members):
                if not member.startswith("_"):
                    found[f"{name}.{member}"] = signature(vars(value).get(member))
    return found


def signature(value):
    """The signature of a function or class; "" of other values."""
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not callable(value):
        return ""
    try:
        return ADDRESS.sub("", str(inspect.signature(value)))
    except ValueError:
        return ""


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
