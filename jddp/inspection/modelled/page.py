"""The page with the picture of a modelled step and its tables: HTML that loads nothing.

Path("step.html").write_text(draw_page(prediction))
"""

from collections.abc import Sequence
from html import escape
from string import Template

import jax

from jddp.html.pages import make_page, table
from jddp.inspection.modelled.links import START_SECONDS
from jddp.inspection.modelled.picture import drawing, hue
from jddp.inspection.modelled.prediction import Prediction
from jddp.inspection.modelled.scaling import MEASURED_ERROR, ScaledStep
from jddp.inspection.modelled.timeline import in_gb, in_mb, in_ms
from jddp.inspection.modelled.transfer_groups import TransferGroup

_STYLE = """
.wide svg { display: block; min-width: 900px } .figures td:first-child { white-space: normal }
i.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  background: hsl(var(--h) 60% 46%) }
i.other { background: #888 }
@media (prefers-color-scheme: dark) { @media screen {
  i.swatch { background: hsl(var(--h) 55% 62%) } i.other { background: #888 }
} }
@media print { .wide svg { min-width: 0 } }
"""
_BODY = Template("""<h1>$verdict</h1>
<p class="note">Modelled, not measured: the order is XLA's for $target (jax $jax), the times are
computed from the assumptions below. Point at a bucket for its figures.</p>
<div class="wide">$drawing</div>
<h2>The step</h2><div class="figures">$figures</div>
$scaling<h2>What is sent</h2><div class="wide">$sent</div>
<h2>What is assumed</h2><div class="wide">$assumed</div>""")


def draw_page(prediction: Prediction) -> str:
    """Returns the picture of a modelled step, with its tables, as one page of HTML."""
    body = _BODY.substitute(
        target=escape(str(prediction.target)),
        jax=jax.__version__,
        verdict=escape(prediction.verdict),
        drawing=drawing(prediction),
        figures=_figures(prediction),
        scaling=_scaling(prediction.scaling),
        sent=_sent(prediction.groups),
        assumed=_assumed(prediction),
    )
    return make_page(f"A modelled step on {prediction.target}", body, style=_STYLE)


def _figures(prediction: Prediction) -> str:
    time, memory = prediction.timeline, prediction.memory
    rows = [
        ["time", in_ms(time.step_seconds)],
        ["computing", in_ms(time.compute_seconds)],
        ["waits for gradients and parameters", f"{prediction.exposed_share:.2%}"],
        ["waits for anything else", f"{prediction.other_exposed_share:.2%}"],
        ["sent by each GPU", f"{in_mb(prediction.sent_bytes)} MB"],
        ["memory of a GPU", f"{memory.total / 1e9:.1f} of {memory.limit / 1e9:.1f} GB"],
    ]
    return table(["modelled", ""], rows, numbers={1})


def _scaling(scaled: Sequence[ScaledStep]) -> str:
    rows = [
        [
            f"{x.num_devices:,}",
            in_ms(x.step_seconds),
            f"{x.waiting_share:.2%}",
            f"{x.efficiency:.1%}",
            x.origin,
        ]
        for x in scaled
    ]
    if not rows:
        return ""
    scales = table(["GPUs", "step", "waits", "efficiency", "program"], rows, numbers={0, 1, 2, 3})
    note = f'<p class="note">As many rows on each GPU. Modelled: {MEASURED_ERROR}.</p>'
    return f'<h2>Weak scaling</h2>{note}<div class="wide">{scales}</div>\n'


def _sent(groups: Sequence[TransferGroup]) -> str:
    head = ["", "parameters", "MB", "dtype", "collective", "runs", "algorithm", "hops"]
    head += ["GPU sends MB", "host sends MB", "GB/s", "takes", "waits"]
    rows = []
    for x in groups:
        kind = "swatch other" if x.number is None else "swatch"
        label = f'<i class="{kind}"{hue(x)}></i>{x.label or "other"}'
        figures = [in_mb(x.bytes), x.dtype, x.op, str(len(x.transfers))]
        moved = [x.choice.algorithm, str(x.choice.hops), in_mb(x.sent_bytes), in_mb(x.host_bytes)]
        times = [in_gb(x.choice.bytes_per_second), in_ms(x.needed_seconds), in_ms(x.waited_seconds)]
        rows.append([label, escape(x.name), *figures, *moved, *times])
    moved = [in_mb(sum(x.sent_bytes for x in groups)), in_mb(sum(x.host_bytes for x in groups))]
    waited = in_ms(sum(x.waited_seconds for x in groups))
    total = ["sum", "", in_mb(sum(x.bytes for x in groups)), *[""] * 5, *moved, "", "", waited]
    return table(head, [*rows, total], numbers={2, 5, *range(7, 13)})


def _assumed(prediction: Prediction) -> str:
    gpu, fabric = prediction.target.gpu, prediction.target.fabric
    rows = [
        [
            name,
            f"{in_gb(x.bytes_per_second)} GB/s",
            f"{1e6 * x.hop_seconds:g} us a hop",
            x.source,
        ]
        for name, x in fabric.links.items()
    ]
    rates = {
        "products": f"{gpu.product_flops / 1e12:g} TFLOP/s",
        "convolutions": f"{gpu.convolution_flops / 1e12:g} TFLOP/s",
        "memory": f"{gpu.bytes_per_second / 1e12:g} TB/s",
    }
    rows += [[name, rate, "", "a share of the data sheet's peak"] for name, rate in rates.items()]
    starts = ", ".join(f"{1e6 * x:g} us" for x in START_SECONDS.values())
    rows.append(["start", "", starts, "of a collective, NCCL: Simple, LL"])
    rows = [[escape(x) for x in row] for row in rows]
    return table(["", "rate", "latency", "source"], rows, numbers={1, 2})
