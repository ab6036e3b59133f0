"""Counts what a step sends, against the least there is; a section of `reduce`.

    python benchmarks/wire.py mlp gpt

Read in the lowered program, since XLA:CPU widens bfloat16 in the compiled one; the number of
all-reduces in the compiled one.
"""

import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)

from crew_jddp import data_parallel  # noqa: E402  # The number of devices comes first.
from jobs import JOBS  # noqa: E402

import jddp  # noqa: E402
from jddp.inspection.hlo import collectives, read_program  # noqa: E402


def gradients(ddp, batch):
    found = collectives(read_program(ddp.steps.lower(batch).as_text("hlo", debug_info=True)))
    return [x for x in found if "bucket_" in x.op_name]


def main() -> None:
    print("wire    layout dtype            bytes  / ideal  reduces buckets")
    for job in sys.argv[1:]:
        batch = JOBS[job].batch()
        for layout, dtype in [("leaf", None), ("flat", None), ("flat", "bfloat16")]:
            ddp = data_parallel(job, reduction=jddp.Reduction(wire_dtype=dtype, layout=layout))
            params = ddp.steps.abstract_state(batch).params
            size = sum(x.size for x in jax.tree.leaves(params)) * (2 if dtype else 4)
            sent = sum(x.bytes for x in gradients(ddp, batch))
            text = ddp.steps.lower(batch).compile().as_text()
            count = sum("bucket_" in x.op_name for x in collectives(read_program(text)))
            name = dtype or "float32"
            row = f"{job:<8}{layout:<6} {name:<9} {sent:>12,} {sent / size:>8.4f}"
            print(f"{row} {count:>8} {len(ddp.steps.planned(batch).plan):>7}")


if __name__ == "__main__":
    main()
