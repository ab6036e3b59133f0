"""Objects that are not what a call takes are refused where they are given, with the way out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import host
from states import equal
from sweeps import swept
from tiny import MODELS, Of, loss_fn, make_batch, make_batches, wrapped

import jddp
from jddp.data import TrainBatches, eval_batches
from jddp.ground.errors import ConfigError, DataError, UsageError
from jddp.trainer.run import Callback


def test_an_optimizer_or_a_strategy_that_is_none_is_refused_with_what_to_give():
    of_nnx = nnx.Optimizer(MODELS["nnx"](), optax.adam(0.1), wrt=nnx.Param)
    for optimizer, kind in ((optax.adam, "function"), (of_nnx, "Optimizer"), ("adam", "str")):
        with pytest.raises(ConfigError, match=rf"optimizer is of type {kind}.*optax.adam\(1e-3\)"):
            wrapped(optimizer=optimizer)
    with pytest.raises(ConfigError, match="strategy=16 is none. Choose 'ddp'"):
        wrapped(strategy=16)


MEANT = {"bucket_cap_mb": "reduction", "find_unused_parameters": "unused_parameters"}
MEANT |= {"broadcast_buffers": "batch_norm", "process_group": "mesh", "device_ids": "mesh"}
MEANT |= {"gradient_accumulation_steps": "accumulate_steps", "max_norm": "max_grad_norm"}
MEANT |= {"wire_dtype": "reduction", "mixed_precision": "precision", "zero_stage": "strategy"}
MEANT |= {"gradient_clip_val": "max_grad_norm", "gradient_clip": "max_grad_norm"}
MEANT |= {"run_dir": "fit(run_dir=)", "logger": "fit(sinks=)", "max_steps": "fit(num_steps=)"}


def test_an_unknown_option_is_given_the_name_that_is_meant():
    for foreign, meant in MEANT.items():
        with pytest.raises(ConfigError, match=re.escape(f"'{foreign}'. Did you mean '{meant}'")):
            wrapped(**{foreign: 25})
    with pytest.raises(ConfigError, match="l.zzz: DataParallel takes no argument 'zzz'.$"):
        wrapped(zzz=1)


def test_fit_knows_the_names_of_its_options_before_it_reads_a_batch():
    def never():
        raise AssertionError("read")
        yield

    meant = {"eval_every": "eval_every_steps", "log_every_n_steps": "log_every_steps"}
    meant |= {"output_dir": "run_dir", "accumulate_steps": "DataParallel(accumulate_steps=)"}
    meant |= {"shuffle": "TrainBatches(order=jddp.data.Order(num_examples, seed, shuffle=False))"}
    for foreign in ("num_workers", "eval_batches", *meant):
        said = f"Did you mean '{meant[foreign]}'" if foreign in meant else ""
        with pytest.raises(ConfigError, match=f"fit.{foreign}: .*{re.escape(said)}"):
            jddp.fit(wrapped(), never(), num_steps=2, **{foreign: 3})


@pytest.mark.parametrize("model", swept(["mlp", "nnx"], every=2))
def test_a_state_of_another_model_is_refused_by_name_and_one_of_another_object_taken(model):
    batch = make_batch()
    wide = Of(lambda m, x, train: nn.Dense(4)(nn.Dense(17)(x)))
    other = wrapped(model=wide).init(0, batch)
    ddp, elsewhere = (wrapped(model=MODELS[model]()) for _ in range(2))
    same = elsewhere.init(1, batch)
    reported = "parameters of another model"
    with pytest.raises(UsageError, match=reported):  # also before this one has a state of its own
        ddp.step(other, batch)
    assert ddp.evaluate(same, [batch]) == elsewhere.evaluate(same, [batch])
    state = ddp.init(0, batch)
    for call in (*calls_of(ddp, batch), ddp.model):
        with pytest.raises(UsageError, match=reported):
            call(other)
    ddp.step(state, batch)
    ddp.step(same, batch)


def calls_of(ddp, batch):
    """Every call that takes a state, with rows."""
    yield from (lambda state, call=x: call(state, batch) for x in (ddp.step, ddp.gradients))
    yield from (lambda state, call=x: call(state, [batch]) for x in (ddp.evaluate, ddp.predict))


def test_what_is_no_state_of_a_device_or_of_others_is_refused_by_name():
    ddp, batch = wrapped(), make_batch()
    state = ddp.init(0, batch)
    run = jddp.fit(ddp, [batch], num_steps=1, state=state)
    other = wrapped(mesh=4).init(0, batch)
    for given, message in (
        (None, "NoneType is none"),
        (state.params, "dict is none"),
        (run, "Run is none"),
        (jax.device_get(state), r"on the devices.*init\(params=state.params\)"),
        (other, "^This state lies on other devices"),
    ):
        for call in calls_of(ddp, batch):
            with pytest.raises(UsageError, match=message):
                call(given)
        if given is not None:
            with pytest.raises(UsageError, match=message):
                jddp.fit(ddp, [batch], num_steps=1, state=given)


def test_a_state_of_another_optimizer_is_refused_where_the_optimizer_is_used():
    ddp, had_a_state, batch = wrapped(), wrapped(), make_batch()
    other = wrapped(optimizer=optax.sgd(0.1, momentum=0.9))
    state = other.init(0, batch)
    had_a_state.init(0, batch)
    for call in (x for each in (ddp, had_a_state) for x in (each.step, each.gradients)):
        with pytest.raises(UsageError, match="from another optimizer"):
            call(state, batch)
    assert ddp.evaluate(state, [batch]) == other.evaluate(state, [batch])


def test_a_seed_or_a_mesh_that_is_none_is_refused_in_one_line():
    for seed in (-1, 2**32, 0.5, "1", True):
        with pytest.raises(ConfigError, match=f"^seed {seed!r} is no whole number from 0 to"):
            wrapped().init(seed, make_batch())
    for mesh in ("4", True, [], ["cpu:0"], {"data": 4}, 2.0):
        with pytest.raises(ConfigError, match=re.escape(f"mesh={mesh!r} is none")):
            wrapped(mesh=mesh)


FP8 = Of(lambda m, x, train: nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_model_with_fp8_layers_is_refused(kind):
    model, batch = FP8, make_batch()
    if kind == "nnx":
        model = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(batch["x"], train=True)
    with pytest.raises(ConfigError, match="_overwrite_with_gradient': its fp8 layers expect that"):
        wrapped(model=model).init(0, batch)


def no_such_key(model, batch, train):
    return loss_fn(model, {"x": batch["image"], "y": batch["y"]}, train)


@pytest.mark.parametrize("model", ["mlp", "nnx"])
def test_a_key_that_the_batch_lacks_is_named_beside_those_that_it_has(model):
    ddp, batch = wrapped(MODELS[model](), loss=no_such_key), make_batch()
    state = ddp.init(0, {"image": batch["x"], "y": batch["y"]})
    reported = r"loss_fn reads batch\['image'\], and the batch holds x, y\."
    calls = [
        (ddp.steps.abstract_state, batch),
        (ddp.step, state, batch),
        (ddp.evaluate, state, [batch]),
    ]
    for call, *given in calls:
        with pytest.raises(ConfigError, match=reported):
            call(*given)
    with pytest.raises(ConfigError, match="as a dict, but it is a tuple. Yield dicts"):
        wrapped().init(0, tuple(batch.values()))


def test_another_key_error_of_the_users_code_stays_what_it_is():
    with pytest.raises(KeyError, match="b"):
        wrapped(loss=lambda *given: loss_fn(*given)[0] * MEANT["b"]).init(0, make_batch())


def test_batches_are_made_of_a_dict_of_arrays_and_not_of_arrays_without_names():
    batch = make_batch(20)
    assert len(eval_batches(batch, global_batch_size=8)) == 3
    batches = TrainBatches({"x": jnp.ones((4, 2))}, global_batch_size=2, seed=0)
    assert isinstance(next(batches)["x"], np.ndarray)
    for make, more in ((TrainBatches, {"seed": 0}), (eval_batches, {})):
        with pytest.raises(DataError, match="of type tuple cannot be read. Give a dict of arrays"):
            make(tuple(batch.values()), global_batch_size=1, **more)


def fractional():
    mask = np.ones(16, np.float32)
    mask[3:9] = 0.5
    mask[9:11] = 0
    return make_batch() | {"mask": mask}


def test_weights_in_the_place_of_a_mask_are_refused():
    ddp, batch = wrapped(), fractional()
    state, message = ddp.init(0, make_batch()), r"'mask'\] holds 0.5: a mask is 1 .* jddp.Mean"
    for call in (
        lambda: ddp.step(state, batch),
        lambda: ddp.evaluate(state, [batch]),
        lambda: jddp.fit(ddp, [batch], num_steps=1),
        lambda: ddp.pad(batch),
    ):
        with pytest.raises(jddp.Error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_on_a_device_every_number_above_zero_counts_once():
    ddp = wrapped()
    ends, mask = [], fractional()["mask"]
    for given in (mask, mask > 0, np.ceil(mask).astype(np.int32)):
        batch = fractional() | {"mask": given}
        placed = jax.device_put(batch, jax.NamedSharding(ddp.mesh, jax.P("data")))
        state, metrics = ddp.step(ddp.init(0, placed), placed)
        ends.append(host((state.params, metrics)))
    equal(ends[1:], ends[:1] * 2)
    assert ends[0][1]["count"] == 14


def aligned(array):
    """A copy that begins at a multiple of 64 bytes, where JAX takes memory as it is on a CPU."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    found = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[:] = array
    return found


class Reused:
    """Batches in one buffer, which the next batch overwrites, and whose state is one dict."""

    def __init__(self):
        self._batches = make_batches(8, rows=16)
        self._buffer = {name: aligned(x) for name, x in self._batches[0].items()}
        self._state = {"position": {"next": 0}}

    def __iter__(self):
        return self

    def __next__(self):
        number = self._state["position"]["next"]
        if number == len(self._batches):
            raise StopIteration
        for name, x in self._batches[number].items():
            self._buffer[name][:] = x
        self._state["position"]["next"] = number + 1
        return self._buffer

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = state


def test_a_batch_may_be_overwritten_by_the_next_in_fit_a_step_and_an_evaluation():
    ddp = wrapped()
    want = jddp.fit(ddp, make_batches(8, rows=16), num_steps=8, evaluate=make_batches(8, rows=16))
    run = jddp.fit(ddp, Reused(), num_steps=8, evaluate=make_batches(8, rows=16))
    equal(run.state.params, want.state.params)
    assert ddp.evaluate(run.state, Reused()) == want.evaluate()
    state = ddp.init(0, make_batch())
    for batch in Reused():
        state, _ = ddp.step(state, batch)
        batch["x"][:] = np.nan
    equal(state.params, want.state.params)


class Fails(Callback):
    def on_step(self, run, metrics):
        if metrics["step"] == 4:
            raise ValueError("mine")


def test_a_saved_position_stays_where_it_was_though_the_iterator_moves_its_own(tmp_path):
    with pytest.raises(ValueError, match="mine"):
        jddp.fit(wrapped(), Reused(), num_steps=8, run_dir=tmp_path, callbacks=[Fails()])
    batches = Reused()
    run = jddp.fit(wrapped(), batches, num_steps=8, run_dir=tmp_path)
    equal(run.state.params, jddp.fit(wrapped(), make_batches(8, rows=16), num_steps=8).state.params)
