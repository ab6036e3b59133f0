"""Compares memory and modelled time of ddp, zero1 and fsdp on H100s that are not there.

    "$(scripts/venv aot)" benchmarks/sharded.py
    "$(scripts/venv aot)" benchmarks/sharded.py --only 124m --hosts 2 \
        --strategies ddp fsdp "fsdp of 8"
    "$(scripts/venv aot)" benchmarks/sharded.py --only 124m 124m_scanned --optimizer muon

GPT-2 of three sizes (8 sequences of 1,024 tokens a GPU, bfloat16 on float32 parameters; AdamW, or
Muon for the matrices of its layers) and
ResNet-50 are compiled through `jddp.DataParallel`, without a GPU and without their parameters.
Nothing is measured but the compiling: the times of a step are modelled as those of overlap.py.
Ratios are to the first strategy.

    state          GiB of the step's arguments on a device: parameters, optimizer, and its rows
    temporaries    GiB beside these on a device, and their ratio
    step           modelled milliseconds of a step, and their ratio
    exposed        share of the step that waits for gradients and parameters
    sent           all-reduces, all-gathers, reduce-scatters, all-to-alls and collective-permutes
                   in the program's text, in which those of a loop stand once
    compile        ratio of the processor time of tracing and compiling
"""

import argparse
import functools
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jddp
from jddp.inspection.hlo import collectives
from jddp.workbench.described import GPUS
from jddp.workbench.schedule import walk

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from described import OPTIMIZERS, compile_layers, compile_resnet50
from networks import make_network

DEVICES_PER_HOST = 8
GPU = GPUS["h100_sxm"]
GIBIBYTE = 2**30
SENT = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
STRATEGIES = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "fsdp, kept": jddp.FSDP(regather=False),
    "fsdp of 8": jddp.FSDP(group_size=8),
}


def gpt2(form: str, num_layers: int, num_heads: int, width: int) -> functools.partial:
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "width": width}
    sizes |= {"vocab_size": 50257, "length": 1024}
    return functools.partial(compile_layers, form, rows=8, sizes=sizes)


JOBS = {
    "124m": ("GPT-2 124M, unrolled", gpt2("unrolled", 12, 12, 768)),
    "124m_scanned": ("GPT-2 124M, scanned", gpt2("scanned", 12, 12, 768)),
    "124m_remat": ("GPT-2 124M, scanned, remat", gpt2("scanned, remat", 12, 12, 768)),
    "1.5b": ("GPT-2 1.5B, scanned, remat", gpt2("scanned, remat", 48, 25, 1600)),
    "6.7b": ("GPT-2 6.7B, scanned, remat", gpt2("scanned, remat", 32, 32, 4096)),
    "resnet50": ("ResNet-50", functools.partial(compile_resnet50, batch_norm="sync")),
}


def measure(
    job: str, strategy: str, num_hosts: int, num_micro_batches: int, optimizer: str
) -> dict[str, float]:
    """What one compiled step takes."""
    sizes = {"num_hosts": num_hosts, "devices_per_host": DEVICES_PER_HOST}
    begun = time.process_time()
    more = {"rows": 8 * num_micro_batches, "accumulate_steps": num_micro_batches}
    options = sizes | (more if num_micro_batches > 1 else {})
    # ResNet-50 has its own optimizer.
    options |= {} if job == "resnet50" else {"optimizer": optimizer}
    step = JOBS[job][1](strategy=STRATEGIES[strategy], **options)
    seconds = time.process_time() - begun
    sent = Counter(x.op for x in collectives(step.program))
    timeline = walk(step.program, GPU, make_network(**sizes))
    return {
        "state": step.argument_bytes,
        "temporaries": step.temporary_bytes,
        "step": timeline.step_seconds,
        "exposed": timeline.exposed_share,
        "compile": seconds,
        **{op: sent[op] for op in SENT},
    }


def compare(job: str, strategies: list[str], *options: int | str) -> None:
    """Prints a row for each strategy."""
    first: dict[str, float] = {}
    for strategy in strategies:
        row = measure(job, strategy, *options)
        first = first or row
        ratio = {name: row[name] / first[name] for name in ("temporaries", "step", "compile")}
        print(
            f"{JOBS[job][0]:26} {strategy:10} {row['state'] / GIBIBYTE:7.2f} "
            f"{row['temporaries'] / GIBIBYTE:8.2f} {ratio['temporaries']:6.3f} "
            f"{row['step'] * 1e3:9.2f} {ratio['step']:6.3f} {row['exposed']:8.2%} "
            f"{''.join(f'{row[op]:4}' for op in SENT)} "
            f"{ratio['compile']:8.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--hosts", nargs="+", type=int, default=[1])
    parser.add_argument("--micro-batches", type=int, default=1, help="of 8 sequences, of a GPT-2")
    arguments = parser.parse_args()
    # The first program of a process costs more.
    tiny = {"num_layers": 2, "num_heads": 2, "width": 64, "vocab_size": 64, "length": 64}
    compile_layers("scanned", rows=1, sizes=tiny)
    for num_hosts in arguments.hosts:
        print(
            f"Modelled, not measured: {num_hosts} x {DEVICES_PER_HOST} {GPU.name}, jax "
            f"{jax.__version__}\n\n{'':37} {'state':>7} {'temporaries':>15} {'step, ms':>16} "
            f"{'exposed':>8} {'sent':>20} {'compile':>8}"
        )
        for job in arguments.only:
            options = num_hosts, arguments.micro_batches, arguments.optimizer
            compare(job, arguments.strategies, *options)


if __name__ == "__main__":
    main()
