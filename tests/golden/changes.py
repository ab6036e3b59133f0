"""What has changed of the public surface, and what it breaks for callers, as griffe reports it."""

import re
from pathlib import Path

import griffe


def changed(old, new):
    """What was added, removed or has changed between two surfaces, each by its name."""
    found = set()
    for kind in old:
        one, other = old[kind], new[kind]
        names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
        if kind == "commands":  # by their options, where the command itself is in both
            both = names & one.keys() & other.keys()
            names = names - both | {x for name in both for x in {*one[name]} ^ {*other[name]}}
        found |= names
    return found


def broken(old, new):
    """What callers of the old signatures notice, a sentence each."""
    return [
        re.sub(r"\x1b\[\d+m", "", breakage.explain())
        for breakage in griffe.find_breaking_changes(as_module(old), as_module(new))
    ]


def as_module(names):
    """Names with their signatures as a module of functions without bodies, and of values."""
    flat = {name.replace(".", "_"): signature for name, signature in names.items()}
    lines = (f"def {x}{about}: ..." if about else f"{x} = ..." for x, about in flat.items())
    return griffe.visit("jddp", Path("jddp/__init__.py"), "\n".join(lines))
