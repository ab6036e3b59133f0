"""Compiled programs are read as they stand, and their schedules are added up without a guess."""

import dataclasses

import pytest
from networks import Network

from jddp.ground.errors import UsageError
from jddp.inspection.hlo import HloShape, collectives, read_program
from jddp.workbench.described import GPUS
from jddp.workbench.schedule import cost, walk

# A second for the product below, nothing for anything else.
FREE = {"bytes_per_second": float("inf"), "kernel_seconds": 0.0}
GPU = dataclasses.replace(GPUS["h100_sxm"], product_flops=2000, convolution_flops=1000, **FREE)
DIMS = "lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
PRODUCT = f"%{{}} = bf16[10,10]{{{{1,0}}}} dot(%x, %x), {DIMS}"
NETWORK = Network("toy", ((64 * 1024, 0.5), (128 * 1024, 3.0)))
START = "%{}-start = f32[32768]{{0}} all-reduce-start(%v), channel_id=1, to_apply=%sum"
DONE = "%{0}-done = f32[32768]{{0}} all-reduce-done(%{0}-start)"
SYNC = ', backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'

PARTS = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%reducing (p: f32[32768]) -> f32[32768] {
  %p = f32[32768]{0} parameter(0)
  ROOT %inner = f32[32768]{0} all-reduce(%p), to_apply=%sum
}

%multiplying (p: bf16[10,10]) -> bf16[10,10] {
  %p = bf16[10,10]{1,0} parameter(0)
  ROOT %dot = bf16[10,10]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%slicing (p: f32[1000000], q: f32[10]) -> f32[10] {
  %p = f32[1000000]{0} parameter(0)
  %q = f32[10]{0} parameter(1)
  %slice = f32[10]{0} slice(%p), slice={[20:30]}
  ROOT %add = f32[10]{0} add(%slice, %q)
}

%true (t: (s32[])) -> pred[] {
  %t = (s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""


def with_part(name, *lines, parts=PARTS):
    """The parts, and one more computation of some lines."""
    body = "\n  ".join(lines)
    return f"""{parts}
{name} (v: f32[32768], x: bf16[10,10], w: (s32[])) -> f32[] {{
  %v = f32[32768]{{0}} parameter(0)
  %x = bf16[10,10]{{1,0}} parameter(1)
  %w = (s32[]) parameter(2)
  {body}
}}
"""


def make_program(*lines, scheduled=True, parts=PARTS):
    head = "HloModule jit_step, is_scheduled=true" if scheduled else "HloModule jit_step"
    entry = with_part("ENTRY %main", *lines, parts=parts)
    return read_program(f"{head}\n{entry}\nFileNames\n1 step.py\n")


def last(program):
    return program.entry.instructions[-1]


def cost_of(line, gpu=GPU, *before):
    program = make_program(*before, line)
    return cost(program, program.entry, last(program), gpu)


def walked(*lines, **options):
    return walk(make_program(*lines, **options), GPU, NETWORK)


def test_an_instruction_is_read_with_its_shapes_operands_and_attributes():
    line = (
        "ROOT %a.1 = (f32[2,3]{1,0:T(8,128)}, /*index=1*/(bf16[]), s32[4]{0:S(5)}) "
        'fusion(%v, /*index=1*/%x), kind=kLoop, calls=%reducing, metadata={op_name="f(g)"}'
    )
    read = last(make_program(line))
    assert (read.name, read.op, read.bytes) == ("a.1", "fusion", 24 + 2 + 16)
    assert read.shapes == (HloShape("f32", (2, 3)), HloShape("bf16", ()), HloShape("s32", (4,)))
    assert (read.operands, read.runs) == (("v", "x"), ("reducing",))


def test_texts_without_percent_signs_are_read_alike_and_parameters_have_a_number():
    old = last(make_program("%r = f32[2]{0} add(f32[2]{0} %v, f32[2]{0} %x.2), metadata={}"))
    assert old == last(make_program("r = f32[2]{0} add(v, x.2), metadata={}"))
    program = make_program("%c = s32[2]{0} constant({1, 2})")  # which has no operands
    assert [x.number for x in program.entry.instructions] == [0, 1, 2, None]
    assert (program.entry.instructions[1].name, last(program).operands) == ("x", ())


BYTES = {"pred[3]{0}": 3, "bf16[3,2]{1,0}": 12, "f8e4m3fn[5]{0}": 5, "s4[3]{0}": 2, "c64[]": 8}
BYTES |= {"f32[<=8]{0}": 32, "token[]": 0}


def test_bytes_follow_from_dtype_and_dims_and_what_is_no_compiled_program_is_refused():
    for shape, num_bytes in BYTES.items():
        assert last(make_program(f"%r = {shape} custom-call()")).bytes == num_bytes
    with pytest.raises(UsageError, match="'odd'"):
        _ = last(make_program("%r = odd[3]{0} custom-call()")).bytes
    for text, message in (
        ("module @jit_step { func.func }", "ENTRY"),
        ("ENTRY %main () -> f32[] {\n  %a = f32[] 3\n}", "no operation"),
        ("ENTRY %main () -> f32[] {\n  %a = f32[] add(%b, %c\n}", "not closed"),
    ):
        with pytest.raises(UsageError, match=message):
            read_program(text)


PLAIN = "%r = f32[32768]{0} all-reduce(%v), to_apply=%sum"
AROUND_A_FUSION = "%s = ((f32[32768]), f32[32768]) fusion-start(%v), kind=kCustom, calls=%reducing"
AROUND_A_COMPUTATION = "%s = ((f32[32768]), f32[32768], s32[]) async-start(%v), calls=%reducing"
FORMS = {
    "pair": (True, START.format("r"), DONE.format("r")),
    "pair_run_in_one_piece": (False, START.format("r") + SYNC, DONE.format("r")),
    "plain": (False, PLAIN),
    "fusion": (False, "%r = f32[32768]{0} fusion(%v), kind=kCustom, calls=%reducing"),
    "around_a_fusion": (True, AROUND_A_FUSION, "%d = f32[32768]{0} fusion-done(%s)"),
    "around_a_computation": (True, AROUND_A_COMPUTATION, "%d = f32[32768]{0} async-done(%s)"),
}
WHOLE = (
    ("%r = (f32[32768]{0}, f32[262144]{0}) all-gather-start(%v), dimensions={0}", 262144),
    ("%r = f32[4096]{0} reduce-scatter(%v), dimensions={0}, to_apply=%sum", 32768),
    ("%r = ((f32[32768]{0}), f32[4096]{0}) reduce-scatter-start(%v), to_apply=%sum", 32768),
    ("%r = f32[32768]{0} all-to-all(%v), dimensions={0}", 32768),
)


@pytest.mark.parametrize("is_async, lines", [(x, y) for x, *y in FORMS.values()], ids=FORMS)
def test_every_form_of_an_all_reduce_is_found_once_and_waited_for(is_async, lines):
    (found,) = collectives(make_program(*lines))
    assert (found.op, found.num_elements, found.bytes) == ("all-reduce", 32768, 131072)
    assert (found.dtypes, found.is_async) == (("f32",), is_async)
    assert (found.is_in_loop, found.num_runs) == (False, 1)
    timeline = walked(*lines)
    (transfer,) = timeline.transfers
    assert (transfer.is_async, transfer.waited_seconds) == (is_async, 3.0)
    assert timeline.step_seconds == 3.0


def test_what_has_several_arrays_or_is_gathered_scattered_or_exchanged_counts_whole():
    line = "%r = (f32[32768]{0}, bf16[10,10]{1,0}) all-reduce(%v, %x), to_apply=%sum"
    (found,) = collectives(make_program(line))
    assert (found.bytes, found.dtypes) == (131072 + 200, ("f32", "bf16"))
    for line, num_elements in WHOLE:
        (found,) = collectives(make_program(line))
        assert found.num_elements == num_elements
        assert found.op in line


def test_a_collective_in_a_loop_runs_as_often_as_all_its_loops_and_in_a_branch_nobody_knows():
    reducing = with_part("%looping", PLAIN)
    nested = with_part("%outer", LOOP, parts=reducing)
    for line, parts, num_runs in (
        (LOOP, reducing, 5),
        (ENDLESS, reducing, None),
        (LOOP.replace("looping", "outer"), nested, 25),
    ):
        (found,) = collectives(make_program(line, parts=parts))
        assert (found.is_in_loop, found.num_runs) == (True, num_runs)
    assert [x.num_runs for x in collectives(make_program(BRANCHES))] == [None, None]


LOOP = (
    "%loop = (s32[]) while(%w), condition=%true, body=%looping, "
    'backend_config={"known_trip_count":{"n":"5"}}'
)
ENDLESS = LOOP.partition(", backend_config")[0]


def test_the_devices_that_send_to_each_other_are_read():
    for groups, devices in (
        ("{}", ()),
        ("{{0,1},{2,3}}", (0, 1)),
        ("[2,2]<=[4]", (0, 1)),
        ("[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
    ):
        line = f"%r = f32[32768]{{0}} all-reduce(%v), replica_groups={groups}, to_apply=%sum"
        assert collectives(make_program(line))[0].devices == devices


def test_the_sends_of_a_permute_are_read_and_its_devices_are_those_that_take_part():
    start = "(f32[32768]{0}, f32[32768]{0}, u32[], u32[]) collective-permute-start"
    for op in ("f32[32768]{0} collective-permute", start):
        line = f"%r = {op}(%v), channel_id=1, source_target_pairs={{{{0,1}},{{1,4}}}}"
        (found,) = collectives(make_program(line))
        assert (found.op, found.bytes) == ("collective-permute", 131072)
        assert (found.pairs, found.devices) == (((0, 1), (1, 4)), (0, 1, 4))


def test_what_is_computed_meanwhile_hides_a_transfer_and_half_an_all_reduce_takes_half_of_it():
    a, b, c = map(PRODUCT.format, "abc")
    timeline = walked(a, START.format("r"), b, DONE.format("r"), c)
    (transfer,) = timeline.large
    assert (transfer.needed_seconds, transfer.hiding_seconds) == (3.0, 1.0)
    assert (transfer.num_products, transfer.waited_seconds) == (1, 2.0)
    assert (timeline.compute_seconds, timeline.step_seconds) == (3.0, 5.0)
    assert timeline.exposed_share == 0.4
    assert (timeline.small, timeline.small_exposed_share) == ((), 0.0)
    for half in ("reduce-scatter", "all-gather"):
        (transfer,) = walked(f"%r = f32[32768]{{0}} {half}(%v), dimensions={{0}}").transfers
        assert transfer.needed_seconds == 1.5


def test_transfers_queue_behind_each_other_and_a_blocking_one_stops_the_clock():
    products = [PRODUCT.format(f"p{i}") for i in range(4)]
    timeline = walked(*map(START.format, "rs"), *products, *map(DONE.format, "rs"))
    first, second = timeline.transfers
    assert (first.name, second.name) == ("r-start", "s-start")
    assert (first.waited_seconds, second.waited_seconds) == (0.0, 2.0)
    assert timeline.step_seconds == 6.0
    timeline = walked(START.format("s"), PRODUCT.format("a"), PLAIN, DONE.format("s"))
    blocking, hidden = timeline.transfers
    assert blocking.waited_seconds == 5.0
    assert (hidden.waited_seconds, hidden.hiding_seconds) == (0.0, 1.0)
    assert timeline.step_seconds == 6.0


def test_a_loop_is_walked_as_often_as_it_runs_and_the_branch_that_sends_most():
    body = PRODUCT.format("a"), START.format("r"), PRODUCT.format("b"), DONE.format("r")
    timeline = walked(LOOP, PRODUCT.format("c"), parts=with_part("%looping", *body))
    assert [x.waited_seconds for x in timeline.large] == [2.0] * 5
    assert (timeline.compute_seconds, timeline.step_seconds) == (11.0, 21.0)
    line = "%r = f32[] conditional(%p, %v, %x), branch_computations={%reducing, %multiplying}"
    (transfer,) = walked(line).transfers
    assert (transfer.bytes, transfer.waited_seconds) == (131072, 3.0)


def test_a_product_costs_its_operations_and_a_fusion_what_is_in_it():
    assert cost_of(PRODUCT.format("r")).seconds == 1.0
    fused = cost_of("%r = bf16[10,10]{1,0} fusion(%x), kind=kCustom, calls=%multiplying")
    assert (fused.seconds, fused.num_products) == (1.0, 1)
    by_library = (
        "%r = (bf16[10,10]{1,0}, s8[0]{0}) custom-call(%x, %x), "
        'custom_call_target="__cublas$gemm", '
        'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    )
    assert cost_of(by_library) == fused
    wide = PRODUCT.format("r").replace("%x", "%y").replace("bf16", "f32")  # twice the bits
    assert cost_of(wide, GPU, "%y = f32[10,10]{1,0} constant(0)").seconds == 2.0


IN, OUT, KERNEL = "[2,8,8,3]", "[2,8,8,5]", "[5,3,3,3]"
DIRECTIONS = {"Forward": (OUT, IN, KERNEL), "BackwardInput": (IN, OUT, KERNEL)}
DIRECTIONS["BackwardFilter"] = KERNEL, IN, OUT


@pytest.mark.parametrize("target", DIRECTIONS)
def test_a_convolution_costs_the_same_in_all_directions(target):
    result, first, second = DIRECTIONS[target]
    operands = f"%i = bf16{first} constant(0)", f"%j = bf16{second} constant(0)"
    line = (
        f"%r = (bf16{result}, u8[0]) custom-call(%i, %j), window={{size=3x3 pad=1_1x1_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"'
    )
    found = cost_of(line, GPU, *operands)
    assert found.seconds * GPU.convolution_flops == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)
    assert found.num_products == 1
    if target == "Forward":
        plain = line.replace(", custom_call_target", ", name").replace("custom-call", "convolution")
        assert cost_of(plain, GPU, *operands) == found


def test_a_loop_costs_its_body_as_often_as_it_runs_and_a_conditional_its_longest_branch():
    program = make_program(LOOP, parts=with_part("%looping", PRODUCT.format("r")))
    found = cost(program, program.entry, last(program), GPU)
    assert (found.seconds, found.num_products) == (5.0, 5)
    line = "%r = f32[] conditional(%p, %x, %v), branch_computations={%multiplying, %sum}"
    assert cost_of(line).seconds == 1.0


def test_what_computes_little_costs_a_kernel_and_its_bytes_of_which_slices_count():
    gpu = dataclasses.replace(GPU, bytes_per_second=1e6, kernel_seconds=0.25)
    assert cost_of("%r = f32[32768]{0} copy(%v)", gpu).seconds == 0.25 + 2 * 131072 / 1e6
    assert cost_of("%r = f32[32768]{0} bitcast(%v)", gpu).seconds == 0.0
    gpu = dataclasses.replace(GPU, bytes_per_second=1.0)
    before = "%p = f32[1000000]{0} constant(0)", "%q = f32[10]{0} constant(0)"
    line = "%r = f32[10]{0} fusion(%p, %q), kind=kLoop, calls=%slicing"
    assert cost_of(line, gpu, *before).seconds == 3 * 40


BRANCHES = "%r = f32[] conditional(%p, %v, %v), branch_computations={%reducing, %reducing}"
REFUSED = {
    "collective-broadcast": "%r = f32[32768]{0} collective-broadcast(%v)",
    "library call 'mystery'": '%r = f32[] custom-call(%v), custom_call_target="mystery"',
    "infeed": "%r = f32[] infeed(%v)",
    "over which dims": "%r = bf16[10,10]{1,0} dot(%x, %x)",
    "does not name its dims": "%r = bf16[10,10]{1,0} convolution(%x, %x)",
}


def test_what_cannot_be_modelled_is_refused():
    looped = [with_part("%looping", line) for line in (PLAIN, PRODUCT.format("r"))]
    refused = [(message, line, {}) for message, line in REFUSED.items()]
    refused += [("unknown number of times", ENDLESS, {"parts": parts}) for parts in looped]
    for message, line, options in (
        *refused,
        ("not scheduled", PRODUCT.format("r"), {"scheduled": False}),
    ):
        with pytest.raises(UsageError, match=message):
            walked(line, **options)
