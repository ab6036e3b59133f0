"""A run resumes with the model, the loss and the optimizer that it was trained with."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from runs import printed, write_sealed
from sweeps import swept
from tiny import MODELS, NUM_CLASSES, loss_fn, make_batch

import jddp
from jddp.ground.errors import ConfigError

WEIGHTS = np.linspace(1, 2, NUM_CLASSES, dtype=np.float32)


class MLP(nn.Module):
    activation: str = "relu"
    offset: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = getattr(nn, self.activation)(nn.Dense(8)(x) + self.offset)
        return nn.Dense(NUM_CLASSES)(x)


class NnxMLP(nnx.Module):
    def __init__(self, activation="relu"):
        self.dense = nnx.Linear(16, NUM_CLASSES, rngs=nnx.Rngs(0))
        self.activation = activation

    def __call__(self, x, train):
        return getattr(nnx, self.activation)(self.dense(x))


def smooth_loss(model, batch, train):
    logits = model(batch["x"], train=train)
    labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], NUM_CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits, labels)


def weighted_by(weights):
    def loss(model, batch, train):
        losses, _ = loss_fn(model, batch, train)
        return losses * jnp.asarray(weights)[batch["y"]]

    return loss


@jax.custom_vjp
def scaled(x):
    return x


scaled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def scaled_loss(model, batch, train):
    return loss_fn(lambda x, train: scaled(model(x, train=train)), batch, train)


def wrapped(model=None, optimizer=None, loss=loss_fn, **options):
    return tiny.wrapped(model or MLP(), optimizer or optax.adamw(1e-3), loss, **options)


def fit(ddp, path, num_steps=2, *, rows=16, masked=False, **options):
    batches = [make_batch(rows, masked=masked)] * num_steps
    return jddp.fit(ddp, batches, num_steps=num_steps, run_dir=path, **options)


def digests(**options):
    ddp = wrapped(**options)
    batch = make_batch()
    return dict(ddp.steps.program(ddp.init(0, batch), batch).digests)


own_digests = functools.cache(digests)
OTHERS = {
    "an activation": ("model", {"model": MLP(activation="gelu")}),
    "a constant of the model": ("model", {"model": MLP(offset=0.5)}),
    "another loss": ("loss", {"loss": smooth_loss}),
    "a gradient": ("loss", {"loss": scaled_loss}),
    "weights of classes": ("loss", {"loss": weighted_by(WEIGHTS)}),
    "a learning rate": ("optimizer", {"optimizer": optax.adamw(1e-2)}),
    "a schedule": ("optimizer", {"optimizer": optax.adamw(optax.linear_schedule(1e-3, 0, 9))}),
    "weight decay": ("optimizer", {"optimizer": optax.adamw(1e-3, weight_decay=0.1)}),
    "clipping": ("optimizer", {"max_grad_norm": 1.0}),
}


@pytest.mark.parametrize("part, options", OTHERS.values(), ids=OTHERS)
def test_each_part_of_a_program_has_a_digest_of_its_own(part, options):
    before, after = own_digests(), digests(**options)
    assert [name for name in before if before[name] != after[name]] == [part]


def test_constants_count_by_their_values_and_models_of_nnx_have_a_digest_too():
    given = (WEIGHTS, WEIGHTS.copy(), 2 * WEIGHTS)
    one, same, other = (digests(loss=weighted_by(x)) for x in given)
    assert one == same != other
    rates = [jnp.asarray([0.1, 0.2]), jnp.asarray([0.1, 0.3])]
    schedules = [optax.sgd(lambda i, x=x: x[i % 2]) for x in rates]
    first, second = (digests(optimizer=x)["optimizer"] for x in schedules)
    assert first != second
    relu, same, gelu = (digests(model=NnxMLP(x)) for x in ("relu", "relu", "gelu"))
    assert relu == same
    assert relu["model"] != gelu["model"]
    assert relu["loss"] == gelu["loss"] == own_digests()["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options", swept([(n, o) for _, (n, o) in sorted(OTHERS.items())][::4], every=3)
)
def test_another_program_is_refused_also_where_nothing_is_left_to_do(tmp_path, name, options):
    fit(wrapped(), tmp_path)
    for num_steps in (2, 4):
        with pytest.raises(ConfigError, match=rf"step 2 .* another {name}, .*resume='changed'"):
            fit(wrapped(**options), tmp_path, num_steps)
    assert fit(wrapped(), tmp_path, 4).step == 4


def test_a_run_continues_with_another_program_on_request(tmp_path, capsys):
    fit(wrapped(), tmp_path)
    other = {"model": MLP(activation="tanh"), "optimizer": optax.adamw(1e-2)}
    fit(wrapped(**other), tmp_path, 4, resume="changed")
    assert "another program: model and optimizer differ" in capsys.readouterr().out
    run = fit(wrapped(**other), tmp_path, 6)  # the program of the newest checkpoint
    assert "another program" not in capsys.readouterr().out
    assert run.step == 6
    with pytest.raises(ConfigError, match="step 6 .* another model and optimizer"):
        fit(wrapped(), tmp_path, 8)


BUCKETS = jddp.Reduction(bucket_mb=0.0001, layout="flat", overlap=True)
WORLDS = [
    ({"mesh": 1}, {}),
    ({"mesh": 8}, {"rows": 32}),
    ({"accumulate_steps": 4}, {}),
    ({"strategy": "zero1"}, {"masked": True}),
    ({"mesh": 4, "reduction": BUCKETS}, {"rows": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "mlp", "nnx"])
def test_other_devices_batches_and_forms_of_a_step_are_the_same_program(tmp_path, name, capsys):
    options = {"model": MODELS[name](), "max_grad_norm": 1.0}
    fit(wrapped(**options), tmp_path, masked=True)
    for num_steps, (of_step, of_run) in enumerate(WORLDS, start=3):
        fit(wrapped(**options, **of_step), tmp_path, num_steps, **of_run)
    assert "another program" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="another optimizer"):
        fit(wrapped(**options, mesh=1, optimizer=optax.adamw(1e-2)), tmp_path, 9)


@pytest.mark.slow
def test_another_version_of_jax_is_a_note_and_a_run_without_a_program_resumes(tmp_path, capsys):
    def rewrite(path, change):
        (folder,) = (path / "checkpoints").glob("[0-9]*")
        beside = json.loads((folder / "run.json").read_text())
        change(beside)
        write_sealed(folder, "run.json", json.dumps(beside))

    for number, rate in enumerate((1e-3, 1e-2)):
        path = tmp_path / str(number)
        fit(wrapped(), path)
        rewrite(path, lambda beside: beside["program"]["made_by"].update(jax="0.0.1"))
        fit(wrapped(optimizer=optax.adamw(rate)), path, 4)
        assert (f"(jax 0.0.1 -> {jax.__version__})" in printed(capsys)) == (rate == 1e-2)
    fit(wrapped(), tmp_path / "early")
    rewrite(tmp_path / "early", lambda beside: beside.pop("program"))
    batch = {**make_batch(8), "name": np.arange(8)}  # which nothing reads
    other = wrapped(optimizer=optax.adamw(1e-2))
    assert jddp.fit(other, [batch] * 4, num_steps=4, run_dir=tmp_path / "early").step == 4
