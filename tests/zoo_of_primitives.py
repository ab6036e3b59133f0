"""Small functions of two matrices, one for each primitive of JAX that has a derivative."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
from jax import lax
from runs import environment

SIZE = 4
F32 = jnp.float32


def matrix_like(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def symmetric(a):
    return a + a.T


def positive(a):
    return a @ a.T + SIZE * jnp.eye(SIZE)


def unit(a):
    """Numbers between 0.1 and 0.9."""
    return 0.5 + 0.4 * jnp.tanh(a)


def host_norm(a):
    """A callback of the host, with a derivative by a custom rule."""

    def call(f, a):
        return jax.pure_callback(f, matrix_like(a), a, vmap_method="sequential")

    norm = jax.custom_vjp(lambda a: call(np.sinh, a))
    norm.defvjp(lambda a: (norm(a), a), lambda a, g: (g * call(np.cosh, a),))
    return norm(a)


def conv(a, b):
    image = a.reshape(1, 1, SIZE, SIZE)
    return lax.conv_general_dilated(image, b[None, None, :2, :2], (1, 1), "SAME")


def with_a_ref(a, b):
    ref = jax.new_ref(a)
    ref[0] = b[0] * a[1]
    ref[1] += b[1]
    return jax.freeze(ref)


def scattered(name):
    def function(a, b):
        at = a.at[jnp.array([0, 2, 1])]
        return getattr(at, name)(unit(b)[:3], unique_indices=True)

    return function


def windowed(init, operation):
    return lambda a, b: lax.reduce_window(a * b, init, operation, (2, 2), (1, 1), "SAME")


def solved(a, b):
    a = positive(a)
    return lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True
    )


def root(a, b):
    def function(x):
        return x**3 + x - a * b

    def newton(f, x):
        return lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x**2 + 1), x)

    return lax.custom_root(
        function, jnp.zeros_like(a), newton, lambda g, y: y / g(jnp.ones_like(y))
    )


def stopped(f):
    """Functions that JAX does not differentiate, beside one that it does."""
    return lambda a, b: f(lax.stop_gradient(a), lax.stop_gradient(b)) * a * b


def until_small(a, b):
    def body(state):
        i, u = state
        u = lax.stop_gradient(a) @ u + lax.stop_gradient(b) @ u
        return i + 1, u / jnp.sqrt((u * u).sum())

    _, u = lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.ones(SIZE)))
    return a @ u / 9


def rounded(f):
    """A loop of rounded numbers, which have no gradient."""

    def function(a, b):
        whole = f(4 * a)
        power = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * whole), (0, whole))
        return power[1] * b

    return function


def noted(a, b):
    jax.debug.callback(lambda a: None, a)
    return a * b


def keyed(a, b):
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.uint32([1, 2])), 3)
    keys = jax.random.split(jax.random.clone(key))
    noise = jax.random.normal(keys[0], a.shape)
    return a * noise + b * jax.random.bernoulli(keys[1], 0.5, b.shape)


def complex_of(a, b):
    return lax.complex(a, b)


def bits_of(a):
    return lax.bitcast_convert_type(a, jnp.int32)


def ssm(a, b):
    """A diagonal state space of complex numbers, by an associative scan."""
    rate = jnp.exp(lax.complex(-jnp.exp(a[0]), b[0]))
    rates = jnp.broadcast_to(rate, (SIZE, SIZE))
    inputs = (a @ b).astype(jnp.complex64)

    def join(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    return lax.associative_scan(join, (rates, inputs))[1].real


def recurrent(a, b):
    """The same by a loop that carries complex numbers."""
    rate = jnp.exp(lax.complex(-jnp.exp(a[0]), b[0]))

    def body(state, row):
        state = rate * state + row
        return state, state.imag

    return lax.scan(body, jnp.zeros(SIZE, jnp.complex64), (a @ b).astype(jnp.complex64))[1]


def spectral(a, b):
    return jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(a)) * jnp.fft.rfft(b), n=SIZE)


def of_both(f):
    return lambda a, b: f(a + b / 4)


SPECIAL = jax.scipy.special
# Of any number, between 0.1 and 0.9, and above 1.
OF_ANY = {
    jnp: "abs arcsinh arctan cos cosh exp exp2 expm1 negative ravel sin sinh sort square"
    " tan tanh transpose",
    lax: "cumlogsumexp cummax cummin cumsum",
    jax.nn: "sigmoid silu",
    SPECIAL: "erf erfc i0e i1e",
}
OF_UNIT = {jnp: "arccos arcsin arctanh cbrt log log1p sqrt", lax: "rsqrt", SPECIAL: "erfinv"}
ABOVE_ONE = {jnp: "arccosh", SPECIAL: "digamma gammaln"}


def named(functions, prepare=lambda a: a):
    """The functions of modules, behind one that makes numbers which they take."""

    def behind(f):
        return lambda a: f(prepare(a))

    return {
        name: behind(getattr(module, name))
        for module, names in functions.items()
        for name in names.split()
    }


UNARY = {
    **named(OF_ANY),
    **named(OF_UNIT, unit),
    **named(ABOVE_ONE, lambda a: 1.5 + unit(a)),
    "broadcast_in_dim": lambda a: jnp.broadcast_to(a[:1], (3, SIZE)),
    "ceil": lambda a: jnp.ceil(3 * a) + a,
    "cholesky": lambda a: jnp.linalg.cholesky(positive(a)),
    "convert_element_type": lambda a: a.astype(jnp.bfloat16),
    "copy": lax.optimization_barrier,
    "cumprod": lambda a: lax.cumprod(1 + unit(a)),
    "eigh": lambda a: jnp.linalg.eigh(symmetric(a) + jnp.diag(9.0 * jnp.arange(SIZE)))[0],
    "floor": lambda a: jnp.floor(3 * a) * a,
    "gather": lambda a: a[jnp.array([0, 2, 2])],
    "integer_pow": lambda a: a**3,
    "lu": lambda a: jax.scipy.linalg.lu(positive(a))[2],
    "pad": lambda a: jnp.pad(a, 1),
    "polygamma": lambda a: jax.scipy.special.polygamma(1, 1 + unit(a)),
    "qr": lambda a: jnp.abs(jnp.linalg.qr(positive(a))[1]),
    "reduce_max": lambda a: a.max(1),
    "reduce_min": lambda a: a.min(1),
    "reduce_prod": lambda a: unit(a).prod(1),
    "reduce_sum": lambda a: a.sum(1),
    "reduce_precision": lambda a: lax.reduce_precision(a, 8, 10),
    "rev": lambda a: a[::-1],
    "round": lambda a: jnp.round(3 * a) * a,
    "sign": lambda a: jnp.sign(a) * a,
    "slice": lambda a: lax.slice(a, (0, 1), (3, 3)),
    "split": lambda a: jnp.split(a, 2)[1],
    "squeeze": lambda a: a[:1].squeeze(0),
    "svd": lambda a: jnp.linalg.svd(a + jnp.diag(9.0 + 9 * jnp.arange(SIZE)))[1],
    "top_k": lambda a: lax.top_k(a, 2)[0],
    "unstack": lambda a: jnp.unstack(a)[1],
    "tile": lambda a: jnp.tile(a, (2, 1)),
    "logsumexp": lambda a: jax.nn.logsumexp(a, 1),
    "softmax": lambda a: jax.nn.softmax(a),
    "callback with a rule": host_norm,
    "sum of logarithms": lambda a: lax.associative_scan(jnp.logaddexp, a),
    "approx_top_k": lambda a: lax.approx_max_k(a, 2)[0],
    "random_gamma": lambda a: jax.random.gamma(
        jax.random.wrap_key_data(jnp.uint32([1, 2])), 1 + unit(a)
    ),
}
BINARY = {
    "add": jnp.add,
    "argmax": lambda a, b: a * (b.argmax(1)[:, None] == jnp.arange(SIZE)[None]),
    "argmin": lambda a, b: a * (b.argmin(1)[:, None] == jnp.arange(SIZE)[None]),
    "atan2": jnp.arctan2,
    "bits": lambda a, b: a * ((bits_of(b) >> 22 << 1 ^ 5) & 3 | 4),
    "clamp": lambda a, b: lax.clamp(-0.2, a, 0.2) + b,
    "compared": lambda a, b: jnp.where((a > b) | (a != 0) & ~(b <= 0), a, b * (a < b)),
    "concatenate": lambda a, b: jnp.concatenate([a, b]),
    "cond": lambda a, b: lax.cond(a[0, 0] > b[0, 0], jnp.multiply, jnp.divide, a, 2 + unit(b)),
    "conv_general_dilated": conv,
    "debug_callback": noted,
    "div": lambda a, b: a / (1 + unit(b)),
    "dot_general": jnp.matmul,
    "dynamic_slice": lambda a, b: lax.dynamic_slice(a, (b.argmax() % 3, 0), (2, SIZE)),
    "dynamic_update_slice": lambda a, b: lax.dynamic_update_slice(a, b[:2], (1, 0)),
    "einsum": lambda a, b: jnp.einsum("ij,kj->ik", a, b),
    "fori_loop": lambda a, b: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ b + i), a),
    "igamma": lambda a, b: lax.igamma(1 + unit(a), unit(b)),
    "igammac": lambda a, b: lax.igammac(1 + unit(a), unit(b)),
    "is_finite": lambda a, b: jnp.where(jnp.isfinite(a), a, b),
    "keys": keyed,
    "linear_solve": solved,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": jnp.multiply,
    "pow": lambda a, b: unit(a) ** b,
    "power iteration": until_small,
    "pure_callback": stopped(
        lambda a, b: jax.pure_callback(np.add, matrix_like(a), a, b, vmap_method="sequential")
    ),
    "ragged_dot_general": lambda a, b: lax.ragged_dot(a, b[None], jnp.array([SIZE])),
    "reduce": lambda a, b: lax.reduce(a * b, np.float32(0), lambda x, y: x + y, (1,)),
    "reduce_window_max": windowed(-jnp.inf, lax.max),
    "reduce_window_min": windowed(jnp.inf, lax.min),
    "reduce_window_sum": windowed(0.0, lax.add),
    "ref": with_a_ref,
    "regularized_incomplete_beta": lambda a, b: lax.betainc(F32(2.0), F32(3.0), unit(a)[0, 0]) * b,
    "rem": lambda a, b: jnp.fmod(a, 2 + unit(b)),
    "remat": jax.checkpoint(lambda a, b: jnp.sin(jnp.tanh(a @ b))),
    "remat with a policy": jax.checkpoint(
        lambda a, b: jnp.sin(jnp.tanh(a @ b)), policy=jax.checkpoint_policies.dots_saveable
    ),
    "root": root,
    "rounded floor": rounded(jnp.floor),
    "rounded sign": rounded(jnp.sign),
    "scan": lambda a, b: lax.scan(lambda c, row: (jnp.tanh(c @ b + row), c), a[0], a)[1],
    "scatter": scattered("set"),
    "scatter-add": scattered("add"),
    "scatter-max": scattered("max"),
    "scatter-min": scattered("min"),
    "scatter-mul": scattered("mul"),
    "scatter-sub": scattered("subtract"),
    "select_n": lambda a, b: jnp.where(a > 0, b, a),
    "stack": lambda a, b: jnp.stack([a, b]),
    "stop_gradient": lambda a, b: lax.stop_gradient(a) * b,
    "sub": lambda a, b: lax.sub(a, b),
    "switch": lambda a, b: lax.switch(
        (a[0] > 0).sum() % 3, [jnp.multiply, jnp.add, lambda a, b: jnp.sin(a)], a, b
    ),
    "triangular_solve": lambda a, b: jax.scipy.linalg.solve_triangular(positive(a), b, lower=True),
    "tridiagonal_solve": lambda a, b: lax.linalg.tridiagonal_solve(
        a[0].at[0].set(0), 9 + unit(a)[1], a[2].at[-1].set(0), b
    ),
    "vmap": lambda a, b: jax.vmap(jnp.dot, (0, None))(a, b),
    "grad": lambda a, b: jax.grad(lambda a: jnp.sin(a @ b).sum())(a),
    "jvp": lambda a, b: jax.jvp(lambda a: jnp.exp(jnp.tanh(a)), (a,), (b,))[1],
    "whole numbers": lambda a, b: a * (3 * b).astype(jnp.int32),
    "eig": stopped(lambda a, b: jnp.sort(jnp.linalg.eigvals(a @ b).real)[None]),
    # Complex numbers.
    "complex": lambda a, b: complex_of(a, b) ** 2,
    "complex abs": lambda a, b: jnp.abs(complex_of(a, b)),
    "complex exp": lambda a, b: jnp.exp(1j * a) * b,
    "complex conj": lambda a, b: jnp.conj(complex_of(a, b)) * complex_of(b, a),
    "complex div": lambda a, b: complex_of(a, b) / complex_of(b, 2 + unit(a)),
    "complex log": lambda a, b: jnp.log(complex_of(1 + unit(a), b)),
    "complex dot": lambda a, b: complex_of(a, b) @ complex_of(b, a),
    "complex angle": lambda a, b: jnp.angle(complex_of(1 + unit(a), b)),
    "complex where": lambda a, b: jnp.where(a > 0, complex_of(a, b), 1j * b),
    "complex solve": lambda a, b: jnp.linalg.solve(positive(a) + 1j * b, complex_of(a, b)),
    "complex jit": lambda a, b: jax.jit(jnp.exp)(complex_of(a, b)) * 2,
    "complex loop": recurrent,
    "complex branches": lambda a, b: lax.cond(
        a[0, 0] > 0, jnp.exp, lambda z: z * z, complex_of(a, b)
    ),
    "complex remat": lambda a, b: jax.checkpoint(lambda z: jnp.exp(z) * z)(complex_of(a, b)),
    "complex constant": lambda a, b: jnp.exp(2j * jnp.arange(SIZE))[None] * a + 1j * b,
    "complex power iteration": lambda a, b: (
        lax.while_loop(
            lambda s: s[0] < 3,
            lambda s: (s[0] + 1, lax.stop_gradient(complex_of(a, b)) @ s[1] / 3),
            (0, jnp.ones(SIZE, jnp.complex64)),
        )[1][None]
        * a
    ),
    "fft": lambda a, b: jnp.fft.fft2(complex_of(a, b)),
    "rfft": spectral,
    "state space": ssm,
}
OPERATIONS = {name: of_both(f) for name, f in UNARY.items()} | BINARY

# Primitives that no model has: JAX's own, of axes, refs and devices; or without a derivative.
NAMES = """
    accum_grad_in_ref add_any addupdate all_gather all_gather_invariant all_gather_reduced
    all_to_all box_get box_set call_hi_primitive check composite custom_vmap_call dce_sink
    debug_print device_put empty_ref eq_to eval_jaxpr ffi_call free_ref from_edtype get_variable
    inspect_sharding io_callback layout_constraint le_to linear_call log_extend log_read lt_to
    mulhi name new_box new_log new_variable pbroadcast ppermute preduced psum psum_invariant pvary
    ragged_all_to_all random_seed random_unwrap reduce_scatter reduce_window reduced_vary_cast_p
    remat_opt reshard run_state select_and_gather_add select_and_scatter_add set_variable
    sharding_constraint stage tie to_edtype unreduced_psum unreduced_reduce_scatter
    vary_unreduced_cast_p
"""
OTHERS = {*NAMES.split()}


def known():
    """Primitives of JAX with a derivative; other libraries, imported here, add their own."""
    program = "from jax.interpreters import ad; print(*[x.name for x in ad.primitive_jvps])"
    command = [sys.executable, "-c", program]
    return {*subprocess.check_output(command, env=environment(), text=True).split()}
