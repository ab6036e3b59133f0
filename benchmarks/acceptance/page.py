"""The page: the verdict first, then all parts, then a section for each."""

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence

from acceptance.result import SKIP, Machine, Part
from jddp.config.versions import source_hash, versions
from jddp.inspection.doctor import BAD, WARN

# Variables that change programs, memory or the network.
_MATTERS = re.compile(r"(?:XLA|NCCL|JAX|CUDA)_|(?:HIP|ROCR)_VISIBLE|LD_LIBRARY_PATH")


def page(parts: Sequence[Part], machine: Machine, environ: Mapping[str, str]) -> str:
    """The page, in Markdown."""
    return "\n".join([*_head(parts, machine, environ), *_sections(parts)]) + "\n"


def verdict(parts: Sequence[Part]) -> str:
    """One sentence: whether the machine is accepted, and the parts that are bad or warn."""
    bad, warn, skipped = (
        [part.title for part in parts if part.result.level == level] for level in (BAD, WARN, SKIP)
    )
    if bad:
        return f"Refused: {', '.join(bad)}"
    text = "Accepted"
    if warn:
        text += f" with {len(warn)} warning{'s' if len(warn) > 1 else ''}: {', '.join(warn)}"
    return f"{text}; without {', '.join(skipped)}" if skipped else text


def _head(parts: Sequence[Part], machine: Machine, environ: Mapping[str, str]) -> Iterator[str]:
    is_trial = "" if machine.is_gpu else " on CPUs: a trial, not a result of GPUs"
    yield from (f"# GPU acceptance{is_trial}", "", f"**{verdict(parts)}.**", "")
    seconds = sum(part.seconds for part in parts)
    devices = f"{machine.num_devices} x {machine.kind}"
    yield f"{devices}, {datetime.date.today()}, {seconds:.0f} s in all."
    yield from ("", "| part | result | s |", "| --- | --- | ---: |")
    for part in parts:
        yield f"| {part.title} | {part.result.level}: {part.result.what} | {part.seconds:.0f} |"
    command = "jddp doctor --gpu-acceptance"
    if not machine.is_gpu:
        command += f" --platform cpu --num-devices {machine.num_devices}"
    yield from ("", "```text", command)
    yield from (f"{name} {version}" for name, version in versions().items())
    yield f"code of jddp {source_hash()[:12]}"
    yield from (f"{x}={environ[x]}" for x in sorted(environ) if _MATTERS.match(x))
    yield "```"


def _sections(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        text = "\n\n".join(filter(None, (part.result.fix, part.result.details)))
        if text:
            yield from ("", f"## {part.title}", "", text)
