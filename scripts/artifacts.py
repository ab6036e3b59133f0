"""Looks at what a release consists of: the files and metadata of its wheel, and needed licences.

    python scripts/artifacts.py wheel dist/jddp-0.1.0-py3-none-any.whl
    python scripts/artifacts.py licences dist/jddp-0.1.0.cdx.json        # of the SBOM

Each prints one line a finding and exits with 1 where there is one. `scripts/release` calls both.
"""

import email
import json
import re
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Where the files of the wheel lie in the checkout.
HOMES = {"jddp/configs/": "configs/", "jddp/project/": "examples/project/"}
# Licences whose terms a program keeps by naming them; a licence with others is a decision.
KNOWN = {"protobuf": "BSD-3-Clause"}  # The package has the text of its licence, and no name of it.
PERMISSIVE = re.compile(r"apache|mit|bsd|isc|psf|python|zlib|0bsd|cc0|unlicense|mpl|cnri", re.I)


def of_wheel(path: Path) -> Iterator[str]:
    """What is missing, too much or wrong in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(wheel.read(metadata))
    info = metadata.removesuffix("METADATA")
    package = {name for name in names if name.startswith("jddp/")}
    homes = {name: home_of(name) for name in package}
    yield from (f"{name} is not in the checkout" for name in package if not homes[name].is_file())
    code = {str(x.relative_to(ROOT)) for x in ROOT.glob("jddp/**/*.py")} | {"jddp/py.typed"}
    yield from (f"{name} is missing" for name in sorted(code - names))
    wanted = {f"{info}licenses/{name}" for name in ("LICENSE", "DATA_LICENSES.md")}
    yield from (f"{name} is missing" for name in sorted(wanted - names))
    for field, want in {
        "Name": [PROJECT["name"]],
        "Version": [PROJECT["version"]],
        "License-Expression": [PROJECT["license"]],
        "Requires-Python": [PROJECT["requires-python"]],
    }.items():
        if about.get_all(field) != want:
            yield f"{field} is {about.get_all(field)}, not {want}"
    needed = {x for x in about.get_all("Requires-Dist", []) if "extra ==" not in x}
    for name in {name_of(x) for x in needed} ^ {name_of(x) for x in PROJECT["dependencies"]}:
        yield f"{name} is needed by the wheel or by pyproject.toml, and not by both"


def home_of(name: str) -> Path:
    """The file of the checkout that a file of the wheel is."""
    for inside, outside in HOMES.items():
        if name.startswith(inside):
            return ROOT / outside / name.removeprefix(inside)
    return ROOT / name


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def of_licences(path: Path) -> Iterator[str]:
    """Packages of an SBOM without a licence, or with one that has conditions of its own."""
    licences = {x["name"]: licence_of(x) for x in json.loads(path.read_text())["components"]}
    for licence, num in Counter(licences.values()).most_common():
        print(f"{num:4}  {licence}", file=sys.stderr)
    for name, licence in sorted(licences.items()):
        if not PERMISSIVE.search(licence):
            yield f"{name} has the licence {licence!r}: decide whether jddp may need it"


def licence_of(component: dict) -> str:
    """The licence of a component: an expression, an identifier or a name."""
    found = [
        entry.get("expression") or entry["license"].get("id") or entry["license"].get("name", "")
        for entry in component.get("licenses", ())
    ]
    named = next((x for x in found if len(x) < 80), KNOWN.get(component["name"], ""))
    return named.removeprefix("License :: OSI Approved :: ")


if __name__ == "__main__":
    looked_at = {"wheel": of_wheel, "licences": of_licences}
    findings = list(looked_at[sys.argv[1]](Path(sys.argv[2])))
    print(*findings, sep="\n", end="\n" * bool(findings))
    sys.exit(bool(findings))
