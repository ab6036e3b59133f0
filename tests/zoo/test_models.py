"""Models: sizes, shapes, precision, and pairs that must agree."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from runs import refused
from states import close
from sweeps import swept

from jddp.ground.errors import ConfigError
from jddp.zoo import attention as tiled
from jddp.zoo.attention import Attention
from jddp.zoo.models import CNN, CNN_NNX, GPT, MLP, MODELS, ViT, gpt2, resnet18, resnet50, vit_b16

IMAGES = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
TOKENS = jax.random.randint(jax.random.key(1), (2, 6), 0, 11)

TINY = {
    "cnn": (CNN(widths=(4, 8), num_classes=5), IMAGES),
    "gpt": (GPT(vocab_size=11, num_layers=2, num_heads=2, width=8, max_length=7), TOKENS),
    "mlp": (MLP(widths=(6,), num_outputs=5), IMAGES),
    "resnet18": (resnet18(width=4, num_classes=5, stem="cifar"), IMAGES),
    "resnet50": (resnet50(width=2, num_classes=5), IMAGES),
    "vit": (ViT(num_layers=2, num_heads=2, width=8, num_classes=5), IMAGES),
}


def num_params(model, inputs):
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def assert_trees_close(got, want, tolerance=1e-5):
    got, want = flatten_dict(got), flatten_dict(want)
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], tolerance, tolerance, err_msg=str(path))


def test_every_model_has_a_name_in_order_and_published_sizes_are_met_exactly():
    assert set(TINY) | {"cnn_nnx", "gpt2", "vit_b16"} == set(MODELS)
    assert list(MODELS) == sorted(MODELS)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    assert num_params(resnet50(), images) == 25_557_032
    assert num_params(resnet18(), images) == 11_689_512
    assert num_params(gpt2(), jax.ShapeDtypeStruct((1, 1024), jnp.int32)) == 124_439_808
    assert num_params(vit_b16(), images) == 86_567_656


@pytest.fixture(autouse=True)
def promotion_inside_flax():
    """Flax's norms promote bfloat16 to float32 for their statistics, which strictness refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", swept([*TINY], every=3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_and_parameters_are_float32_whatever_the_arithmetic(name, dtype):
    model, inputs = TINY[name]
    model = model.clone(dtype=dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    options = {"train": True, "mutable": True, "rngs": {"dropout": jax.random.key(1)}}
    outputs, _ = jax.eval_shape(lambda x: model.apply(x, inputs, **options), variables)
    assert outputs.shape == (len(inputs), *((6, 11) if name == "gpt" else (5,)))
    assert outputs.dtype == jnp.float32


def lowered_gradient(model, inputs):
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
    return jax.jit(jax.grad(lambda x: model.apply(x, inputs).sum())).lower(variables)


def test_gradients_of_embeddings_are_added_up_in_float32():
    text = lowered_gradient(TINY["gpt"][0].clone(dtype="bfloat16"), TOKENS).as_text()
    assert re.findall(r'"stablehlo.scatter".*?\}\) : \(tensor<([^>]*)>', text, re.S) == ["11x8xf32"]
    reduced = "across dimensions = [0] : (tensor<{}xf32>, tensor<f32>) -> tensor<{}xf32>"
    assert reduced.format("2x6x8", "6x8") in text
    text = lowered_gradient(TINY["vit"][0].clone(dtype="bfloat16"), IMAGES).as_text()
    assert reduced.format("4x4x8", "4x8") in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", swept(["float32", "bfloat16"], every=2))
def test_a_gradient_by_one_hot_rows_equals_that_by_a_scatter(dtype):
    model, _ = TINY["gpt"]
    tokens = jnp.array([[0, 2, 2, 10, 2, 0], [3, 3, 0, 1, 7, 2]])
    variables = model.init(jax.random.key(0), tokens)
    grads = []
    for how in ("scatter", "one_hot"):
        chosen = model.clone(embedding_gradient=how, dtype=dtype)
        gradient = jax.grad(lambda x, m=chosen: jnp.square(m.apply(x, tokens)).sum())
        assert ("scatter" in str(jax.make_jaxpr(gradient)(variables))) == (how == "scatter")
        grads.append(gradient(variables)["params"])
    assert_trees_close(*grads)


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_dropout_acts_in_training_only(name):
    model, inputs = TINY[name]
    model = model.clone(dropout_rate=0.5)
    variables = jax.jit(model.init)(jax.random.key(0), inputs)

    @partial(jax.jit, static_argnames="train")
    def outputs(seed, train):
        return model.apply(variables, inputs, train, rngs={"dropout": jax.random.key(seed)})

    assert (outputs(1, train=True) != outputs(2, train=True)).any()
    np.testing.assert_array_equal(outputs(1, train=False), outputs(2, train=False))


def test_attention_is_chosen_while_tracing_and_named_once(monkeypatch, caplog):
    caplog.set_level("INFO", "jddp")
    tiled._report.cache_clear()
    kernels, attend = [], jax.nn.dot_product_attention

    def note(*arrays, implementation, **options):
        kernels.append(implementation)
        if arrays[0].dtype == jnp.float32 and implementation == "cudnn":
            raise NotImplementedError("cuDNN computes in 16 bits.")
        return attend(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", note)
    model, inputs = TINY["gpt"]

    def trace(**options):
        kernels.clear()
        jax.eval_shape(model.clone(**options).init, jax.random.key(0), inputs)
        return set(kernels)

    assert trace() == trace(attention="xla") == {"xla"}
    with refused(ConfigError, "no GPU"):
        trace(attention="cudnn")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert trace(dtype=jnp.bfloat16) == {"cudnn"}
    assert "xla" in trace(dtype=jnp.float32)
    with refused(ConfigError, "16 bits"):
        trace(attention="cudnn", dtype=jnp.float32)
    assert [x.removeprefix("attention ") for x in caplog.messages] == [
        "xla: this process computes on no GPU",
        "xla: chosen",
        "cudnn",
        "xla: cuDNN computes in 16 bits",
    ]


def test_attention_fits_the_layers_of_linen_and_nnx_and_refuses_dropped_weights():
    x, mask = jax.random.normal(jax.random.key(0), (2, 5, 8)), np.tri(5, dtype=bool)[None, None]
    sizes = {"num_heads": 2, "qkv_features": 8}
    for options in ({}, {"mask": mask}):
        plain = nn.MultiHeadDotProductAttention(**sizes)
        variables = plain.init(jax.random.key(1), x)
        got = plain.clone(attention_fn=Attention()).apply(variables, x, **options)
        np.testing.assert_allclose(got, plain.apply(variables, x, **options), atol=1e-6)
        layers = (
            nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **attend)
            for attend in ({}, {"attention_fn": Attention()})
        )
        np.testing.assert_allclose(*(layer(x, **options) for layer in layers), atol=1e-6)
    drops = nn.MultiHeadDotProductAttention(
        **sizes, dropout_rate=0.5, attention_fn=Attention(), deterministic=False
    )
    with refused(ConfigError, "dropout_rate"):
        drops.init(jax.random.key(1), x)


def test_gpt_does_not_see_the_future():
    model, _ = TINY["gpt"]
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    apply = jax.jit(model.apply)
    logits, changed = apply(variables, TOKENS), apply(variables, TOKENS.at[:, 4:].set(0))
    np.testing.assert_allclose(changed[:, :4], logits[:, :4], rtol=1e-6, atol=1e-6)
    assert (changed[:, 4:] != logits[:, 4:]).any()


@pytest.mark.parametrize(
    "mask", [None, np.tri(7, k=2, dtype=bool)[None, None]], ids=["all", "mask"]
)
def test_attention_in_tiles_is_attention_with_its_gradient(monkeypatch, mask):
    monkeypatch.setattr(tiled, "TILE_SIZE", 3)
    arrays = jax.random.normal(jax.random.key(0), (3, 2, 7, 2, 4))
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 2**-5)):
        for is_causal in (False, True):
            options = {"mask": mask, "is_causal": is_causal}
            got, want = (
                jax.vjp(partial(attend, **options), *arrays.astype(dtype))
                for attend in (Attention("xla"), jax.nn.dot_product_attention)
            )
            ends = (jax.tree.leaves((x, pullback(x))) for x, pullback in (got, want))
            for one, other in zip(*ends, strict=True):
                assert one.dtype == other.dtype == dtype
                np.testing.assert_allclose(
                    one.astype("float32"), other.astype("float32"), tolerance, tolerance
                )


def stacked(params):
    """The parameters under a scan over the two layers."""
    blocks = [params[f"block_{index}"] for index in range(2)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    return others | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


@pytest.mark.slow
@pytest.mark.parametrize("name", swept(["gpt", "vit"], every=2))
def test_remat_and_a_scan_over_layers_equal_plain(name, monkeypatch):
    plain, inputs = TINY[name]
    params = jax.jit(plain.init)(jax.random.key(0), inputs)["params"]

    def loss_and_grads(model, params):
        def loss(params):
            return jnp.square(model.apply({"params": params}, inputs, train=True)).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    want, grads = loss_and_grads(plain, params)
    monkeypatch.setattr("jddp.zoo.attention.TILE_SIZE", 4)  # for 6 tokens
    for remat, scan_layers in itertools.product(["none", "attention", "blocks"], [False, True]):
        model, given = plain.clone(remat=remat, scan_layers=scan_layers), params
        if scan_layers:
            given, own = stacked(params), jax.eval_shape(model.init, jax.random.key(0), inputs)
            assert jax.tree.map(jnp.shape, own["params"]) == jax.tree.map(jnp.shape, given)
        loss, got = loss_and_grads(model, given)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        assert_trees_close(got, stacked(grads) if scan_layers else grads)


def test_the_backward_pass_is_left_the_values_that_remat_keeps():
    model, inputs = TINY["gpt"]
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def kept(remat):
        def pullback(params):
            return jax.vjp(lambda x: model.clone(remat=remat).apply(x, inputs), params)[1]

        return [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(pullback, params))]

    num_weights = 2 * 2 * 6 * 6
    counts = {word: kept(word).count(num_weights) for word in ("none", "attention", "blocks")}
    assert counts["none"] > 0
    assert counts["attention"] == counts["blocks"] == 0
    assert sum(kept("blocks")) < sum(kept("attention")) < sum(kept("none"))
    assert kept(True) == kept("blocks")
    assert kept(False) == kept("none")


def test_linen_and_nnx_networks_agree_in_training_and_after_it():
    linen, _ = TINY["cnn"]
    variables = jax.jit(linen.init)(jax.random.key(0), IMAGES)
    module = CNN_NNX(widths=(4, 8), image_size=8, num_channels=3, num_classes=5, rngs=nnx.Rngs(1))
    for index, (conv, norm) in enumerate(zip(module.convs, module.norms, strict=True)):
        conv.kernel[...] = variables["params"][f"Conv_{index}"]["kernel"]
        norm.scale[...] = variables["params"][f"BatchNorm_{index}"]["scale"]
        norm.bias[...] = variables["params"][f"BatchNorm_{index}"]["bias"]
    module.dense.kernel[...] = variables["params"]["Dense_0"]["kernel"]
    module.dense.bias[...] = variables["params"]["Dense_0"]["bias"]
    module.train()
    outputs, updated = linen.apply(variables, IMAGES, train=True, mutable="batch_stats")
    close(module(IMAGES), outputs)
    for index, norm in enumerate(module.norms):
        want = updated["batch_stats"][f"BatchNorm_{index}"]
        close({"mean": norm.mean[...], "var": norm.var[...]}, want)
    module.eval()
    outputs = linen.apply(variables | updated, IMAGES, train=False)
    close(module(IMAGES), outputs)


@pytest.mark.parametrize("name", swept(["cnn", "resnet18"], every=2))
def test_images_of_mask_0_change_nothing_for_the_others(name):
    model, images = TINY[name]
    variables = model.init(jax.random.key(0), images)
    padded = jnp.concatenate([images[:3], 1e3 * images[:2]])
    run = partial(model.apply, variables, train=True, mutable="batch_stats")
    want, want_written = run(images[:3])
    got, written = run(padded, mask=jnp.array([1.0, 1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(got[:3], want, 1e-5, 1e-5)
    assert_trees_close(written["batch_stats"], want_written["batch_stats"])


def test_the_nnx_network_leaves_images_of_mask_0_out_and_keeps_float32_parameters():
    padded = jnp.concatenate([IMAGES[:3], 1e3 * IMAGES[:2]])
    one, other = (CNN_NNX((4, 8), 8, 3, num_classes=5, rngs=nnx.Rngs(0)) for _ in range(2))
    got = one(padded, mask=jnp.array([1.0, 1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(got[:3], other(IMAGES[:3]), 1e-5, 1e-5)
    got, want = (nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)) for model in (one, other))
    assert_trees_close(got, want)
    narrow = CNN_NNX((4,), image_size=8, num_channels=3, dtype="bfloat16", rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.state(narrow, (nnx.Param, nnx.BatchStat)))
    assert {leaf.dtype for leaf in [*leaves, narrow(IMAGES)]} == {jnp.dtype("float32")}


def test_impossible_sizes_are_refused():
    for model, inputs, message in (
        (GPT(num_heads=3, width=8), TOKENS, "num_heads"),
        (GPT(max_length=5), TOKENS, "max_length"),
        (GPT(attention="flash"), TOKENS, "attention 'flash'"),
        (GPT(remat="layers"), TOKENS, "remat 'layers'"),
        (GPT(gelu="tan"), TOKENS, "gelu 'tan'"),
        (GPT(embedding_gradient="sort"), TOKENS, "embedding_gradient 'sort'"),
        (ViT(patch_size=3), IMAGES, "patch_size"),
        (ViT(pooling="max"), IMAGES, "pooling 'max'"),
        (resnet18(stem="mnist"), IMAGES, "stem 'mnist'"),
    ):
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(model.init, jax.random.key(0), inputs)
