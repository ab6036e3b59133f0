"""Models how much of the communication of a step is hidden, on H100s that are not there.

    "$(scripts/venv aot)" benchmarks/overlap.py
    "$(scripts/venv aot)" benchmarks/overlap.py --only gpt2 --hosts 2 --transfers

ResNet-50 and GPT-2 124M are compiled through `jddp.DataParallel`, without a GPU, and the schedules
that XLA makes are added up at the rates printed below the table. Nothing is measured: a number here
is what the schedule allows, not what a machine does. The second table walks the same schedules at
other rates. `leaf, end` is what one gets by averaging gradients without further thought; the gate
in tests/workbench/test_overlap_on_gpus.py requires that the model finds fault with it.

    all-reduces    above 64 KiB: gradients; how many of them run while nothing else does
    exposed        share of the step that waits for these
    small          the other all-reduces: loss and metrics, statistics of synced batch norm
    temporaries    memory beside arguments and results, as a multiple of a step without reduction
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jddp.inspection.hlo import HloProgram, purpose_of
from jddp.workbench.described import GPUS
from jddp.workbench.schedule import Timeline, Transfer, walk

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from described import VARIANTS, compile_gpt2, compile_resnet50
from networks import make_network

NUM_DEVICES = 8
GPU = GPUS["h100_sxm"]
SLOW = replace(GPU, product_flops=400e12, convolution_flops=250e12, bytes_per_second=2.0e12)
FAST = replace(GPU, product_flops=850e12, convolution_flops=700e12, bytes_per_second=3.3e12)

# What is compiled: a label, a function, and its options beside those of each variant.
JOBS = {
    "resnet50": ("resnet50, local batch norm", compile_resnet50, {}),
    "resnet50_sync": ("resnet50, synced batch norm", compile_resnet50, {"batch_norm": "sync"}),
    "gpt2": ("gpt2 124M", compile_gpt2, {}),
    "gpt2_clipped": ("gpt2 124M, clipped", compile_gpt2, {"max_grad_norm": 1.0}),
}


def print_rates(num_hosts: int) -> None:
    def rates(gpu):
        return (
            f"{gpu.product_flops / 1e12:.0f} TFLOP/s in products, "
            f"{gpu.convolution_flops / 1e12:.0f} in convolutions, "
            f"{gpu.bytes_per_second / 1e12:.1f} TB/s"
        )

    network = make_network(num_hosts=num_hosts, devices_per_host=NUM_DEVICES // num_hosts)
    times = (f"{network.seconds(mb * 2**20) * 1e6:.0f} us for {mb} MiB" for mb in (1, 8, 25, 150))
    least = f"{network.seconds(0) * 1e6:.0f} us at least"
    print(f"base: {rates(GPU)}, {GPU.kernel_seconds * 1e6:.0f} us a kernel")
    print(f"slow: {rates(SLOW)}\nfast: {rates(FAST)}")
    print(f"an all-reduce over {network.name}: {least}, {', '.join(times)}\n")


def print_transfers(timeline: Timeline) -> None:
    for each in timeline.large:
        print(
            f"      {each.bytes / 1e6:7.2f} MB {'async' if each.is_async else 'sync ':5} needs "
            f"{each.needed_seconds * 1e6:5.0f} us, hidden by {each.hiding_seconds * 1e6:6.0f} us "
            f"and {each.num_products:3} products, waits {each.waited_seconds * 1e6:5.0f} us"
        )


def print_statistics(program: HloProgram, timeline: Timeline) -> None:
    """Prints what statistics of batch norm cost in each direction, and what they must cost."""
    by_direction: dict[str, list[Transfer]] = {}
    for each in timeline.small:
        by_direction.setdefault(purpose_of(each.collectives[0]), []).append(each)
    for purpose, found in by_direction.items():
        if not purpose.startswith("the model"):
            continue
        waited = sum(each.waited_seconds for each in found)
        line = (
            f"      {purpose}: {len(found)} small all-reduces, of which computing waits for "
            f"{sum(each.waited_seconds > 1e-6 for each in found)}: {waited * 1e6:.0f} us, "
            f"{waited / timeline.step_seconds:.2%}"
        )
        if purpose.endswith("forward"):
            chain = longest_chain(program, {each.name for each in found})
            floor = chain * min(each.needed_seconds for each in found)
            line += f"; {chain} wait for one another: {floor * 1e6:.0f} us"
        print(line)


def longest_chain(program: HloProgram, among: set[str]) -> int:
    """The most of these instructions of which each needs the result of the one before."""
    longest: dict[str, int] = {}
    for each in program.entry.instructions:
        before = max((longest[operand] for operand in each.operands), default=0)
        longest[each.name] = before + (each.name in among)
    return max(longest.values())


def compare(job: str, num_hosts: int, *, transfers: bool) -> list[str]:
    """Prints a row for each variant; returns the rows of the second table."""
    label, compile_job, options = JOBS[job]
    sizes = {"num_hosts": num_hosts, "devices_per_host": NUM_DEVICES // num_hosts}
    network = make_network(**sizes)
    others = {
        "slow": (SLOW, network),
        "base": (GPU, network),
        "fast": (FAST, network),
        "2x": (GPU, network.slower(2)),
        "4x": (GPU, network.slower(4)),
    }
    rows, without = [], None
    for variant, chosen in VARIANTS.items():
        compiled = compile_job(**sizes, **options, **chosen)
        without = without or compiled.temporary_bytes
        timeline = walk(compiled.program, GPU, network)
        blocking = sum(not each.is_async for each in timeline.large)
        print(
            f"{label:27} {variant:11} {len(timeline.large):5} ({blocking:2} alone) "
            f"{sum(each.bytes for each in timeline.large) / 1e6:7.1f} MB "
            f"{timeline.step_seconds * 1e3:7.2f} ms {timeline.exposed_share:8.2%} "
            f"{len(timeline.small):6} {timeline.small_exposed_share:7.2%} "
            f"{compiled.temporary_bytes / without:8.3f}",
            flush=True,
        )
        print_statistics(compiled.program, timeline)
        if transfers:
            print_transfers(timeline)
        if timeline.large:
            shares = (walk(compiled.program, *rates).exposed_share for rates in others.values())
            rows.append(f"{label:27} {variant:11}" + "".join(f"{x:8.2%}" for x in shares))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--hosts", nargs="+", type=int, choices=[1, 2, 4], default=[1, 2])
    parser.add_argument("--transfers", action="store_true", help="print each large all-reduce")
    arguments = parser.parse_args()
    for num_hosts in arguments.hosts:
        print(
            f"Modelled, not measured: {num_hosts} x {NUM_DEVICES // num_hosts} {GPU.name}, "
            f"jax {jax.__version__}\n\n{'':27} {'':11} {'all-reduces':>16} {'':10} {'step':>10} "
            f"{'exposed':>8} {'small':>6} {'exposed':>7} temporaries"
        )
        rows = [
            row
            for job in arguments.only
            for row in compare(job, num_hosts, transfers=arguments.transfers)
        ]
        print(f"\nexposed, at other rates{'':16}    slow    base    fast  net 2x  net 4x")
        print("\n".join(rows) + "\n")
        print_rates(num_hosts)


if __name__ == "__main__":
    main()
