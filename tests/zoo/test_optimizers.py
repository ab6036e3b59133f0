import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jddp.ground.errors import ConfigError
from jddp.zoo.optimizers import decay_mask, make_optimizer, make_schedule

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "norm": {"scale": jnp.ones(3)},
}


@pytest.fixture(autouse=True)
def _optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def rates(name, steps, **options):
    given = {"learning_rate": 0.5, "num_steps": 10, "kwargs": {}} | options
    schedule = make_schedule(name, **given)
    return np.array([schedule(step) for step in steps])


def test_a_schedule_is_filled_with_the_peak_rate_and_the_length_of_the_run_after_warm_up():
    cosine = rates("cosine_decay_schedule", [0, 5, 10])
    np.testing.assert_allclose(cosine, [0.5, 0.25, 0], atol=1e-7)
    np.testing.assert_allclose(rates("constant_schedule", [0, 10]), [0.5, 0.5])
    linear = rates("linear_schedule", [0, 5, 10], kwargs={"end_value": 0.1})
    np.testing.assert_allclose(linear, [0.5, 0.3, 0.1], rtol=1e-6)
    given = rates("cosine_decay_schedule", [5], kwargs={"decay_steps": 5, "alpha": 0.1})
    np.testing.assert_allclose(given, [0.05], rtol=1e-6)
    found = rates("cosine_decay_schedule", [0, 1, 4, 7, 10], warmup_steps=4)
    np.testing.assert_allclose(found, [0, 0.125, 0.5, 0.25, 0], atol=1e-7)
    assert rates("cosine_decay_schedule", [9], warmup_steps=100) == pytest.approx(0.045)
    by_itself = rates("warmup_cosine_decay_schedule", [0, 1, 4, 7, 10], warmup_steps=4)
    np.testing.assert_allclose(by_itself, found, atol=1e-7)


WRONG_SCHEDULES = (
    ("linear", {}, "Did you mean 'linear_schedule'?"),  # and not 'lion', which is an optimizer
    ("constant", {}, "Did you mean 'constant_schedule'?"),
    ("cosine", {}, "optimizer.schedule.name: optax has no 'cosine'. Did you mean 'cosine_decay"),
    ("constant_schedule", {"valu": 1}, "kwargs.valu: constant_schedule takes no argument 'valu'"),
    ("polynomial_schedule", {}, "optimizer.schedule.kwargs.end_value is missing"),
    ("cosine_decay_schedule", {"decay_steps": -1}, "cosine_decay_schedule refuses them: "),
    ("l2_loss", {"predictions": 1.0}, "is no schedule"),
    ("__version__", {}, "which cannot be called"),
)


def test_a_wrong_schedule_is_refused_in_its_own_words():
    for name, kwargs, message in WRONG_SCHEDULES:
        with pytest.raises(ConfigError) as caught:
            make_schedule(name, learning_rate=0.1, num_steps=10, kwargs=kwargs)
        assert message in str(caught.value)


def update(optimizer, params=PARAMS):
    return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "lamb", "lars", "contrib.muon"])
def test_any_optimizer_of_optax_takes_a_step_on_its_schedule(name):
    schedule = make_schedule("constant_schedule", learning_rate=0.1, num_steps=3, kwargs={})
    optimizer, followed = make_optimizer(name, schedule=schedule)
    assert followed is schedule
    assert jax.tree.structure(update(optimizer)) == jax.tree.structure(PARAMS)


def test_arguments_reach_the_optimizer():
    ours, _ = make_optimizer("adamw", schedule=lambda step: 0.1, kwargs={"b1": 0.5, "eps": 1e-3})
    theirs = optax.adamw(0.1, b1=0.5, eps=1e-3, mask=decay_mask)
    gradients = jax.tree.map(lambda x: 2 * x, PARAMS)
    pair = [o.update(gradients, o.init(PARAMS), PARAMS)[0] for o in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_weight_decay_spares_norms_and_biases_unless_told_otherwise(name):
    def moved(**more):
        kwargs = {"weight_decay_rate" if name == "adafactor" else "weight_decay": 0.1}
        made, _ = make_optimizer(name, schedule=lambda step: 0.1, kwargs=kwargs | more)
        return jax.tree.map(lambda u: bool(jnp.any(u != 0)), update(made))

    masks = {"weight_decay_mask" if name == "adafactor" else "mask"}
    assert moved() == {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    assert all(jax.tree.leaves(moved(**dict.fromkeys(masks))))
    scanned = {"kernel": jnp.ones((4, 2, 3)), "bias": jnp.ones((4, 3)), "scale": jnp.ones((4, 3))}
    assert decay_mask(scanned) == {"kernel": True, "bias": False, "scale": False}


WRONG_OPTIMIZERS = (
    ("adamv", {}, "optimizer.name: optax has no 'adamv'. Did you mean 'adam"),
    ("SGD", {}, "Did you mean 'sgd'?"),
    ("linear_schedul", {}, "optax has no 'linear_schedul'."),
    ("contrib.muonn", {}, "Did you mean 'muon'?"),
    ("adamw", {"weight_decy": 1}, "kwargs.weight_decy: adamw takes no argument 'weight_decy'. Did"),
    ("MultiSteps", {}, "optimizer.kwargs.opt is missing"),
    ("l2_loss", {"predictions": 1.0}, "l2_loss gives"),
    (lambda: 3, {}, "<lambda> gives int, no optimizer."),
)


def test_a_wrong_optimizer_is_refused_in_its_own_words_and_a_bug_keeps_its_traceback():
    for factory, kwargs, message in WRONG_OPTIMIZERS:
        with pytest.raises(ConfigError) as caught:
            make_optimizer(factory, schedule=lambda step: 0.1, kwargs=kwargs)
        assert message in str(caught.value)
    with pytest.raises(TypeError):
        make_optimizer(lambda learning_rate: "rate: " + learning_rate, schedule=lambda step: 0.1)


def test_ones_own_factory_is_given_the_rate_if_it_asks_and_none_is_reported_if_not():
    def asks(learning_rate, momentum):
        return optax.sgd(learning_rate, momentum)

    def schedule(step):
        return 0.1

    _, followed = make_optimizer(asks, schedule=schedule, kwargs={"momentum": 0.9})
    assert followed is schedule
    _, followed = make_optimizer(lambda: optax.sgd(0.5), schedule=schedule)
    assert followed is None
