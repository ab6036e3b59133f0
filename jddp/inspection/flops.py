"""The floating-point operations of a model, and the time that they take a GPU at its peak rates.

    found = count_flops(planned.traced)     # of one micro-batch; nothing is traced for it
    found                                   # {"bfloat16": 1.1e12, "tf32": 0.1e12}
    uncounted(planned.traced)               # {"pallas_call"}: kernels that the trace does not show
    seconds_at_peak(found, "NVIDIA H100 80GB HBM3")

These are the *model FLOPs* of the MFU of Chowdhery et al.: products and convolutions of the traced
passes. A multiplication and the addition that follows are two operations. A loop counts times its
length, a branch as its most expensive one, and attention whole, also where a mask makes half of it
needless. Operations that the backward pass repeats do not count: a product of the backward pass
counts only if a factor depends on the cotangent of the loss. The optimizer and the sums over
replicas do not count.

A convolution counts each position of its smaller side with each of the kernel's: padding counts, as
is usual in tables of models, and the zeros that a gradient puts between positions do not.

Peak rates are as their makers publish them, dense: where a document has only the rate with
sparsity, half of that is taken. They are rates of products that are summed in float32.

References:
  Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
  https://arxiv.org/abs/2204.02311
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jddp.engine.planned import Traced
from jddp.ground import jaxprs

TF32 = "tf32"  # float32 products, whose factors hardware may round to 11 bits
KINDS = ("bfloat16", "float16", TF32, "float32")

# Dense TFLOP/s of these kinds, by name of the device; 0 for a kind that it lacks. A V100
# and a T4 do not round float32. Comments have the documents' figures for 16 bits, TF32 and float32;
# "sparse" marks figures with sparsity. They were found again, 2026-11-25 and 26, in copies of these
# documents or in tables of others; the GH200's figures were not.
PEAKS = {
    # 125, none, 15.7. "NVIDIA V100 Tensor Core GPU", data sheet, January 2020, column SXM2.
    # https://www.nvidia.com/en-us/data-center/v100/
    "Tesla V100-SXM2-16GB": (0, 125, 15.7, 15.7),
    "Tesla V100-SXM2-32GB": (0, 125, 15.7, 15.7),
    # 65, none, 8.1. "NVIDIA T4 Tensor Core GPU", data sheet 951643.
    # https://www.nvidia.com/en-us/data-center/tesla-t4/
    "Tesla T4": (0, 65, 8.1, 8.1),
    # 312, 156, 19.5. "NVIDIA A100 Tensor Core GPU", data sheet 1758950, r4.
    # https://www.nvidia.com/a100
    "NVIDIA A100-SXM4-40GB": (312, 312, 156, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 312, 156, 19.5),
    "NVIDIA A100-PCIE-40GB": (312, 312, 156, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 312, 156, 19.5),
    # SXM 1,979 sparse, 989 sparse, 67; NVL 1,671 sparse, 835 sparse, 60; the PCIe card had 1,513
    # sparse, 756 sparse, 51.
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    "NVIDIA H100 80GB HBM3": (989, 989, 494, 67),
    "NVIDIA H100 NVL": (835, 835, 417, 60),
    "NVIDIA H100 PCIe": (756, 756, 378, 51),
    # As the H100: SXM 1,979 sparse, 989 sparse, 67; NVL 1,671 sparse, 835 sparse, 60.
    # https://www.nvidia.com/en-us/data-center/h200/
    "NVIDIA H200": (989, 989, 494, 67),
    "NVIDIA H200 NVL": (835, 835, 417, 60),
    # 1,979 sparse, 989 sparse, 67. https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/
    "NVIDIA GH200 480GB": (989, 989, 494, 67),
    "NVIDIA GH200 144G HBM3e": (989, 989, 494, 67),
    # A GPU of an HGX B200: 4,500 sparse, 2,200 sparse, 75. "NVIDIA Blackwell", data sheet, and
    # https://www.nvidia.com/en-us/data-center/hgx/
    "NVIDIA B200": (2250, 2250, 1100, 75),
    # 242 sparse, 120 sparse, 30.3. https://www.nvidia.com/en-us/data-center/l4/
    "NVIDIA L4": (121, 121, 60, 30.3),
    # 362.05, which is less than half of 733 sparse, 366; 183, 91.6.
    # https://www.nvidia.com/en-us/data-center/l40s/
    "NVIDIA L40S": (362, 362, 183, 91.6),
    # 71, 35.6, 35.6; 154.8, 77.4, 38.7. Tables 2 and 3.
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    "NVIDIA GeForce RTX 3090": (71, 71, 35.6, 35.6),
    "NVIDIA RTX A6000": (154.8, 154.8, 77.4, 38.7),
    # 165.2, 82.6, 82.6. Table 2 and appendix; the RTX 6000 has 1,457 in fp8
    # sparse, and 91.1 in float32.
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1),
    # 209.5, 104.8, 104.8. Table 3, at https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/
    # nvidia-rtx-blackwell-gpu-architecture.pdf
    "NVIDIA GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8),
}


def seconds_at_peak(flops: Mapping[str, float], device: str) -> float | None:
    """The time that operations take one device at its peak rates; None if one is not known.

    Args:
      flops: Operations by kind, as `jddp.inspection.flops` counts them.
      device: Name of the device, `device_kind` of a `jax.Device`.
    """
    rates = dict(zip(KINDS, PEAKS.get(device, ()), strict=False))
    if not all(rates.get(kind) for kind in flops):
        return None
    return sum(number / (rates[kind] * 1e12) for kind, number in flops.items())


# Primitives whose products are not counted: kernels, whose products no traced program shows, and
# products of groups.
_UNCOUNTED = {"ffi_call", "pallas_call", "ragged_dot_general", "scaled_matmul_wrapper"}
_UNCOUNTED |= {"dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"}

# Operations by dtype of the factors; "tf32" for float32 that hardware may round.
Flops = Counter[str]
# A label for each result, 1 if it depends on inputs labelled 1, and the operations.
_Counted = tuple[list[int], Flops]


def count_flops(traced: Traced) -> Flops:
    """The operations of the forward and the backward pass over one micro-batch of one replica.

    Args:
      traced: The traced passes, `Planned.traced`.
    """
    return count_inside(traced.forward.jaxpr) + count_inside(traced.backward)


def count_inside(jaxpr: Jaxpr) -> Flops:
    """The operations of a program that depend on its inputs; constants do not."""
    return _count_labelled(jaxpr, [1] * len(jaxpr.invars))[1]


def uncounted(traced: Traced) -> set[str]:
    """Names of the primitives whose operations in a step are not all counted.

    A `while` is one: its length is not known, so that it counts as one iteration.
    """
    found = [*jaxprs.equations(traced.forward.jaxpr), *jaxprs.equations(traced.backward)]
    names = {eqn.primitive.name for eqn in found} & _UNCOUNTED
    loops = (eqn.params["body_jaxpr"].jaxpr for eqn in found if eqn.primitive.name == "while")
    return names | {"while" for body in loops if count_inside(body)}


def _count_labelled(jaxpr: Jaxpr, given: Sequence[int]) -> _Counted:
    """Counts operations that depend on inputs labelled 1, and labels the results."""
    labels = dict(zip(jaxpr.invars, given, strict=True))
    total = Flops()

    def label_of(v: Var | Literal) -> int:
        return 0 if isinstance(v, Literal) else labels.get(v, 0)

    for eqn in jaxpr.eqns:
        results, found = _count_equation(eqn, [*map(label_of, eqn.invars)])
        labels |= zip(eqn.outvars, results, strict=True)
        total.update(found)
    return [*map(label_of, jaxpr.outvars)], total


def _count_equation(eqn: JaxprEqn, given: list[int]) -> _Counted:
    name = eqn.primitive.name
    results = [max(given, default=0)] * len(eqn.outvars)
    if not any(given) or name in _UNCOUNTED:
        return results, Flops()
    if name in _PRODUCTS:
        return results, _product(eqn, _PRODUCTS[name](eqn))
    if name == "optimization_barrier":
        return given, Flops()
    if name in _CONTROL:
        return _CONTROL[name](eqn, given)
    if inner := jaxprs.called(eqn):
        return _count_labelled(inner, given)
    return results, sum(map(count_inside, jaxprs.jaxprs_in_params(eqn.params)), Flops())


def _branches(eqn: JaxprEqn, given: list[int]) -> _Counted:
    counted = [_count_labelled(branch.jaxpr, given[1:]) for branch in eqn.params["branches"]]
    labels = zip(*(results for results, _ in counted), strict=True)
    most = max((found for _, found in counted), key=Flops.total)
    return [max(given[0], *of_one) for of_one in labels], most


def _scan(eqn: JaxprEqn, given: list[int]) -> _Counted:
    first, last = jaxprs.carried(eqn)
    body = eqn.params["jaxpr"].jaxpr
    results, found = jaxprs.follow_loop(
        given[first:last],
        lambda carry: _count_labelled(body, [*given[:first], *carry, *given[last:]]),
    )
    return results, Flops({kind: x * eqn.params["length"] for kind, x in found.items()})


def _while(eqn: JaxprEqn, given: list[int]) -> _Counted:
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    body = eqn.params["body_jaxpr"].jaxpr
    return jaxprs.follow_loop(
        given[last:], lambda carry: _count_labelled(body, [*given[first:last], *carry])
    )


def _product(eqn: JaxprEqn, number: int) -> Flops:
    """FLOPs from the number of multiplications; integer operations count zero."""
    dtype = jnp.promote_types(*map(jaxprs.dtype_of, eqn.invars[:2]))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return Flops()
    return Flops({TF32 if jaxprs.may_round(eqn) else dtype.name: 2 * number})


def _dot(eqn: JaxprEqn) -> int:
    (summed, _), _ = eqn.params["dimension_numbers"]
    factor = jaxprs.aval_shape(eqn.invars[0])
    return math.prod(jaxprs.aval_shape(eqn.outvars[0])) * math.prod(factor[dim] for dim in summed)


def _convolution(eqn: JaxprEqn) -> int:
    shapes = map(jaxprs.aval_shape, (*eqn.invars, *eqn.outvars))
    dims = zip(shapes, eqn.params["dimension_numbers"], strict=True)
    inputs, kernel, outputs = ([shape[dim] for dim in spec] for shape, spec in dims)
    positions = math.prod(map(min, inputs[2:], outputs[2:]))
    return math.prod(outputs[:2]) * positions * math.prod(kernel[1:])


def _attention(eqn: JaxprEqn) -> int:
    """Multiplications of cuDNN's kernel: scores and sums of values, or two gradients of both."""
    num_products = 4 if "_bwd_" in eqn.primitive.name else 2
    query, key = map(jaxprs.aval_shape, eqn.invars[:2])
    # Arrays are (b, t, heads, ...), or else (b, heads, t, ...).
    return num_products * math.prod(query) * key[2 if eqn.params["layout"] else 1]


_CONTROL = {"cond": _branches, "scan": _scan, "while": _while}
_PRODUCTS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": _attention,
    "dot_product_attention_bwd_wrapper": _attention,
}
