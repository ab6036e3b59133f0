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
    """Names with their signatures as a module without bodies."""
    tree = {}
    for name, signature in names.items():
        place = tree
        for part in name.split("."):
            place = place.setdefault(part, {})
        place[""] = signature
    code = "\n".join(line for name, inner in tree.items() for line in definition(name, inner))
    return griffe.visit("jddp", Path("jddp/__init__.py"), code)


def definition(name, inner):
    """The lines of a name: a class where it has members, or begins with a capital letter."""
    signature = inner.get("", "")
    members = {member: x for member, x in inner.items() if member}
    if not members and not name[0].isupper():
        return [f"def {name}{signature}: ..." if signature else f"{name} = ..."]
    lines = [f"class {name}:", "    pass"]
    if signature:
        lines.append(
            f"    def __init__{signature.replace('(', '(self, ', 1).split(' -> ')[0]}: ..."
        )
    for member, value in members.items():
        lines += [f"    {line}" for line in definition(member, value)]
    return lines
