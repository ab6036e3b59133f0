"""Programs with divided parameters: gathered at the first use, a slice at a time in scans."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jddp.ground.jaxprs import equations
from jddp.reduce.lazy import ANYTHING, PARAMETERS, Lazy, Origin, forget
from jddp.reduce.shards import VECTORS, AllToAll, Groups, divided_dim, exchange_on
from jddp.reduce.units import Gather, Part

NUM, WIDTH, LAYERS = 4, 8, 3
MOVED, GIVEN = Origin(PARAMETERS, moves=True), Origin(ANYTHING, moves=False)
DIMS = {(): None, (3,): None, (4, 0): None, (4,): 0, (3, 3, 4, 16): 3, (8, 8): 0, (15, 3): None}


def test_the_largest_dim_that_the_number_of_replicas_divides_is_divided():
    assert {shape: divided_dim(shape, NUM) for shape in DIMS} == DIMS


def in_a_loop(w, x):
    fixed = lax.stop_gradient(w)  # JAX differentiates no `while`
    end = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ fixed)), (0, x))
    return (end[1] * (x @ w)).sum()


def by_a_custom_rule(w, x):
    product = jax.custom_vjp(lambda w, x: x @ w)
    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda wx, g: (wx[1].T @ g, g @ wx[0].T))
    return product(w, x).sum()


def normalized(w, x):
    """Weight norm: values made of parameters alone, with a derivative that is not linear."""
    unit = w / jnp.linalg.norm(w, axis=0, keepdims=True)
    return (x @ unit.astype(jnp.bfloat16).astype(jnp.float32)).sum()


PROGRAMS = {
    "called": lambda w, x: jax.jit(lambda w: jnp.tanh(x @ w))(w).sum(),
    "in_branches": lambda w, x: lax.cond(
        x.sum() > 0, lambda: (x @ w).sum(), lambda: jnp.square(x @ w).sum()
    ),
    "in_a_loop": in_a_loop,
    "by_a_custom_rule": by_a_custom_rule,
    "normalized": normalized,
    "repeated": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w))(w, x).sum(),
    "constant_of_a_loop": lambda w, x: lax.scan(
        lambda c, _: (jnp.tanh(c @ w.T), None), x, length=3
    )[0].sum(),
    "penalized": lambda w, x: (x @ w).sum() + jnp.square(w).sum(),
    "used_by_none": lambda w, x: x.sum(),
    "returned": lambda w, x: w.sum() + 0 * x.sum(),
}


def by_a_forward_rule(w, x):
    product = jax.custom_jvp(jnp.matmul)
    product.defjvp(lambda ins, tangents: jax.jvp(jnp.matmul, ins, tangents))
    return jnp.sin(product(x, w)).sum()


def power_iteration(w, x):
    def body(state):
        u = lax.stop_gradient(w) @ state[1]
        return state[0] + 1, u / jnp.linalg.norm(u)

    _, u = lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.ones(WIDTH)))
    return (x @ w @ u).sum() / 9


def rounded_in_a_loop(w, x):
    """Rounded numbers have no gradient."""
    whole = jnp.floor(4 * w)
    end = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * whole), (0, whole))[1]
    return (x @ (end * w)).sum() / 99


def with_a_ref(w, x):
    ref = jax.new_ref(w)
    ref[0] = w[1] * x.sum(0)
    ref[1] += w[2]
    return (x @ jax.freeze(ref)).sum()


def on_the_host(w, x):
    fixed = lax.stop_gradient(w)
    like = jax.ShapeDtypeStruct(w.shape, w.dtype)
    return (x @ (w * jax.pure_callback(np.square, like, fixed, vmap_method="sequential"))).sum()


def of_complex_branches(w, x):
    wave = lax.complex(w, x.T @ x)
    chosen = lax.cond(x[0, 0] > -9, jnp.exp, jnp.conj, wave)
    return jnp.abs(jax.checkpoint(lambda z: jnp.exp(-z) * z)(chosen)).sum()


def by_fourier(w, x):
    waves = jnp.fft.rfft(jnp.tanh(w)) * jnp.fft.rfft(x.T @ x)
    return jnp.square(jnp.fft.irfft(waves, n=WIDTH)).sum()


def state_space(w, x):
    """A diagonal state space of complex numbers, by an associative scan."""
    rates = jnp.broadcast_to(jnp.exp(lax.complex(-jnp.exp(w[0]), w[1])), x.shape)

    def join(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    return lax.associative_scan(join, (rates, (x @ w).astype(jnp.complex64)))[1].real.sum()


def in_a_switch(w, x):
    return lax.switch((x[0] > 0).sum() % 2, [jnp.multiply, jnp.add], w, w.T).sum() * x.sum()


OTHERS = [by_a_forward_rule, in_a_switch, power_iteration, rounded_in_a_loop, with_a_ref]
OTHERS += [on_the_host, of_complex_branches, by_fourier, state_space]
repeated_layer = jax.checkpoint(
    lambda c, w: (jnp.sin(jnp.tanh(c @ w) @ w), None), prevent_cse=False
)
SCANS = {
    "scanned": lambda w, x: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum(),
    "scanned_and_repeated": lambda w, x: lax.scan(repeated_layer, x, w)[0].sum(),
    "scanned_backwards": lambda w, x: lax.scan(
        lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w, reverse=True
    )[1].sum(),
    "scanned_twice": lambda w, x: lax.scan(
        lambda c, w: (lax.scan(lambda c, v: (jnp.tanh(c * v[None]), None), c, w)[0], None), x, w
    )[0].sum(),
}


def on_replicas(function, in_specs, out_specs):
    """The function as it is run by each replica."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM]), ("data",))
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def gradients(program, w, x, *, keeps=False, exchange=VECTORS):
    """The jitted function that returns the mean gradient of `program`, part by part."""
    dim = divided_dim(w.shape[w.ndim - 2 :], NUM) + w.ndim - 2
    lazy = Lazy(Gather("data", exchange, Groups(NUM)), (2**20,), keeps)

    def replica(part, x):
        traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct(w.shape, w.dtype), x)

        def loss(part):
            return lazy.evaluate(traced, [Part(part, dim, w.shape), x], [MOVED, GIVEN])[0]

        return jax.grad(loss if keeps else jax.checkpoint(loss, policy=forget))(part)

    spec = P(*[None] * dim, "data")
    return jax.jit(on_replicas(replica, (spec, P("data")), spec))


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32) / 2


def beside_one_device(program, w, x, **options):
    got = gradients(program, w, x, **options)(w, x)
    shares = jnp.split(x, NUM)
    want = functools.reduce(jnp.add, [jax.grad(program)(w, share) for share in shares]) / NUM
    # Sums of four replicas in another order.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "program", [*PROGRAMS.values(), *OTHERS], ids=[*PROGRAMS, *(x.__name__ for x in OTHERS)]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_the_parts_of_the_mean(program, keeps):
    beside_one_device(program, numbers(WIDTH, WIDTH), numbers(2 * NUM, WIDTH, seed=1), keeps=keeps)


@pytest.mark.parametrize("name", SCANS)
def test_parameters_that_a_scan_slices_are_gathered_in_its_body(name):
    program = SCANS[name]
    w, x = numbers(LAYERS, WIDTH, WIDTH), numbers(2 * NUM, WIDTH, seed=1)
    beside_one_device(program, w, x, exchange=AllToAll())
    traced = jax.make_jaxpr(gradients(program, w, x))(w, x)
    found = [e for e in equations(traced.jaxpr) if e.primitive.name == "all_gather"]
    whole = {(LAYERS, WIDTH, WIDTH), (LAYERS * WIDTH * WIDTH,)}
    assert found
    assert not {v.aval.shape for e in found for v in e.outvars} & whole
    assert max(v.aval.size for e in found for v in e.outvars) <= WIDTH * WIDTH
    if name != "scanned_twice":
        scans = [e for e in equations(traced.jaxpr) if e.primitive.name == "scan"]
        assert len(scans) == 2  # one in each pass
        stacked = {v.aval.shape for e in scans for v in (*e.invars, *e.outvars)}
        assert (LAYERS, WIDTH // NUM, WIDTH) in stacked
        assert (LAYERS, WIDTH, WIDTH) not in stacked


def narrow(*arrays):
    return [x.astype(jnp.bfloat16) for x in arrays]


def cast_before_a_scan(w, x):
    x, w = narrow(x, w)
    return lax.scan(lambda c, w: (c @ w, None), x, w)[0].sum(dtype=jnp.float32)


def cast_after_another(w, x):
    w = w.astype(jnp.bfloat16).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return jnp.square(x @ w).sum()


CASTING = {  # with the dtype in which the parameter travels
    "twice": (  # as a model whose layers cast a parameter that they share
        lambda w, x: (jnp.matmul(*narrow(x, w)) @ narrow(w)[0]).sum(dtype=jnp.float32),
        "bf16",
    ),
    "in a call": (
        lambda w, x: jnp.square(jnp.matmul(*narrow(x), *jax.jit(narrow)(w))).sum(dtype=jnp.float32),
        "bf16",
    ),
    "before a scan": (cast_before_a_scan, "bf16"),
    "after another": (cast_after_another, "bf16"),
    "beside a use that is wide": (
        lambda w, x: jnp.square(jnp.matmul(*narrow(x, w))).sum(dtype="float32") + (x @ w).sum(),
        "f32",
    ),
}


@pytest.mark.parametrize("program, dtype", CASTING.values(), ids=CASTING)
def test_a_parameter_that_is_only_cast_is_gathered_in_the_narrow_dtype(program, dtype):
    layers = [LAYERS] if program is cast_before_a_scan else []
    # Whole numbers, of which few bits are set: sums are exact in any order and either dtype.
    w = jnp.round(numbers(*layers, WIDTH, WIDTH))
    x = jnp.round(numbers(2 * NUM, WIDTH, seed=1))
    run = gradients(program, w, x, keeps=True)
    want = jax.grad(lambda w: sum(map(functools.partial(program, w), jnp.split(x, NUM))) / NUM)(w)
    np.testing.assert_array_equal(run(w, x), want)
    text = run.lower(w, x).as_text()
    sent = re.findall(
        r"stablehlo\.(all_gather|reduce_scatter).*?-> tensor<[\dx]*x(\w+)>", text, re.S
    )
    assert sent == [("all_gather", dtype), ("reduce_scatter", "f32")]


@pytest.mark.parametrize("name", [*PROGRAMS, *SCANS])
def test_a_parameter_is_gathered_once_in_each_pass_however_often_it_is_used(name):
    program = (PROGRAMS | SCANS)[name]
    w = numbers(*([LAYERS] if name in SCANS else []), WIDTH, WIDTH)
    x = numbers(2 * NUM, WIDTH, seed=1)
    traced = jax.make_jaxpr(gradients(program, w, x))(w, x)
    times = Counter(e.primitive.name for e in equations(traced.jaxpr))
    num_used = int(name != "used_by_none")
    # The gradient of a last product needs the rows alone.
    num_passes = 1 if name in ("called", "in_branches", "in_a_loop") else 2 * num_used
    assert (times["all_gather"], times["reduce_scatter"]) == (num_passes, num_used)


OF_PARAMETERS = ["called", "normalized", "repeated", "scanned", "scanned_and_repeated"]


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_nothing_made_of_parameters_alone_is_kept_for_the_backward_pass(name):
    w, x = numbers(LAYERS, WIDTH, WIDTH), numbers(2, WIDTH, seed=1)
    w, program = w if name in SCANS else w[0], (PROGRAMS | SCANS)[name]
    dim = w.ndim - 2
    lazy = Lazy(Gather("data", VECTORS, Groups(NUM)), (2**20,), keeps=False)
    kept = []

    def replica(part, x):
        traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct(w.shape, w.dtype), x)

        def loss(part):
            return lazy.evaluate(traced, [Part(part, dim, w.shape), x], [MOVED, GIVEN])[0]

        value, pullback = jax.vjp(jax.checkpoint(loss, policy=forget, prevent_cse=False), part)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf is not part)
        return value

    jax.eval_shape(on_replicas(replica, (P(*[None] * dim, "data"), P()), P()), w, x)
    assert kept
    assert not [shape for shape in kept if shape[-2:] == (WIDTH, WIDTH)]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_means_of_groups_that_are_averaged_are_the_mean_of_all_replicas(platform):
    groups = Groups(size=2, num=2)
    gather = Gather("data", exchange_on(platform, groups), groups)
    grads = np.random.default_rng(0).integers(-9, 9, (NUM, WIDTH, 3)).astype(np.float32)

    def replica(part, grad):
        whole, pullback = jax.vjp(lambda x: gather([x], [0], x.dtype)[0], part)
        return whole[None], *gather.mean_of_groups(pullback(grad[0]), (2**20,))

    parts = np.arange(3 * WIDTH, dtype=np.float32).reshape(WIDTH, 3)
    wholes, means = jax.jit(on_replicas(replica, P("data"), P("data")))(
        np.concatenate([parts] * 2), grads
    )
    np.testing.assert_array_equal(wholes, [parts] * NUM)
    np.testing.assert_array_equal(means, np.concatenate([grads.mean(0)] * 2))


def test_a_unit_is_one_gather_and_its_gradients_one_reduce_scatter():
    w = numbers(LAYERS, WIDTH, WIDTH)

    def layers(w, x):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), [*w], x).sum()

    for unit_bytes, units in (((2**20,), 1), ((WIDTH * WIDTH * 4,), LAYERS)):
        lazy = Lazy(Gather("data", VECTORS, Groups(NUM)), unit_bytes, keeps=True)

        def replica(parts, x, lazy=lazy):
            traced = jax.make_jaxpr(lambda *w: layers(w[:-1], w[-1]))(*w, x)

            def loss(parts):
                given = [*(Part(part, 0, (WIDTH, WIDTH)) for part in parts), x]
                return lazy.evaluate(traced, given, [*[MOVED] * LAYERS, GIVEN])[0]

            return jax.grad(loss)(parts)

        mapped = on_replicas(replica, P("data"), P("data"))
        text = jax.jit(mapped).lower([*w], numbers(2 * NUM, WIDTH)).as_text()
        counts = [text.count(f"stablehlo.{op}") for op in ("all_gather", "reduce_scatter")]
        assert counts == [units, units]
