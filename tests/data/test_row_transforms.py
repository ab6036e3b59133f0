"""Transforms of rows give the same numbers on the host and on devices."""

import jax
import numpy as np
import pytest
from states import equal

from jddp.data import ArrayExamples, Mix, Order, TrainBatches, eval_batches
from jddp.data.examples import Concatenated, Subset
from jddp.data.sources.arrays import image_examples
from jddp.data.transforms import (
    Chain,
    CropAndFlip,
    FlipAndShift,
    Normalize,
    Transformed,
    as_stored,
    normalize,
)
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import TRANSFORM

SIZE = 12


def stored_images(num=64):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, SIZE, SIZE, 3), dtype=np.uint8)
    return image_examples(images, np.arange(num), mean=[0.4, 0.5, 0.6], std=0.25)


def batches_of(*, on_device, **options):
    return TrainBatches(
        stored_images(), global_batch_size=32, seed=3, on_device=on_device, **options
    )


def on_devices(batch):
    """What a compiled step makes of a batch."""
    batch = dict(batch)
    return jax.jit(batch.pop(TRANSFORM))(batch)


CASES = {
    "normalized alone": {},
    "shifted": {"transforms": [FlipAndShift(2)]},
    "cropped": {"transforms": [CropAndFlip()]},
    "both, then mixed": {"transforms": [CropAndFlip(), FlipAndShift(1)], "mix": Mix(mixup=0.3)},
    "boxes": {"mix": Mix(cutmix=1.0)},
    "mixed or boxes": {"transforms": [FlipAndShift(2)], "mix": Mix(mixup=0.2, cutmix=0.7)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_rows_transformed_on_devices_are_the_rows_of_the_host(options):
    here, there = batches_of(on_device=False, **options), batches_of(on_device=True, **options)
    for _ in range(3):
        want, given = next(here), next(there)
        assert given["image"].dtype == np.uint8
        got = on_devices(given)
        assert got.keys() == want.keys()
        for name, x in want.items():
            # Places of pixels are float32 numbers up to 12, so an interpolation between pixels
            # that differ by 4 is exact to 4 x 12 x 2^-24, and some operations more.
            np.testing.assert_allclose(got[name], x, atol=2e-5, err_msg=name)
        assert here.get_state() == there.get_state()


def test_rows_for_devices_have_a_quarter_of_the_bytes_and_a_function_that_is_always_the_same():
    here, there = batches_of(on_device=False), batches_of(on_device=True)
    assert next(there)["image"].nbytes * 4 == next(here)["image"].nbytes
    assert next(there)[TRANSFORM] == batches_of(on_device=True).example[TRANSFORM]
    no_transform = TrainBatches({"x": np.arange(8)}, global_batch_size=4, seed=0, on_device=True)
    assert next(no_transform).keys() == {"x"}


def test_evaluation_normalizes_and_draws_nothing():
    examples = stored_images()
    (plain,) = eval_batches(examples, global_batch_size=64)
    (given,) = eval_batches(examples, global_batch_size=64, on_device=True)
    assert given["image"].dtype == np.uint8
    # A product and a difference, which XLA may fuse into one rounding.
    np.testing.assert_allclose(on_devices(given)["image"], plain["image"], atol=1e-6)
    augmented = Chain((Normalize(0.4, 0.25), CropAndFlip()))
    alone = Chain((Normalize(0.4, 0.25),))
    rows = {"image": given["image"]}
    equal(augmented(rows), alone(rows))


def test_examples_are_read_as_they_are_stored_below_any_choice_of_them():
    examples = stored_images()
    assert isinstance(examples, Transformed)
    part = Subset(examples, np.array([5, 2]))
    stored, chain = as_stored(part)
    assert stored.take(np.arange(2))["image"].dtype == np.uint8
    equal(chain(stored.take(np.arange(2))), part.take(np.arange(2)))
    both = Concatenated([examples, part], ["one", "two"])
    stored, chain = as_stored(both)
    equal(chain(stored.take(np.array([3, 65]))), both.take(np.array([3, 65])))
    assert stored.take(np.array([65]))["image"].dtype == np.uint8
    other = image_examples(np.zeros((2, SIZE, SIZE, 3), np.uint8), np.arange(2))  # of other scale
    assert as_stored(Concatenated([examples, other], ["one", "two"]))[1] == Chain()
    plain = ArrayExamples({"x": np.arange(3)})
    assert as_stored(plain) == (plain, Chain())


def test_the_example_has_the_form_of_all_batches():
    for options in ({}, {"num_epochs": 0.8}, {"multiple_of": 7}):
        batches = batches_of(on_device=True, mix=Mix(0.2), **options)
        first = next(batches)
        forms = [
            {name: (x.dtype, x.shape[1:]) for name, x in batch.items() if name != TRANSFORM}
            for batch in (first, batches.example)
        ]
        assert forms[0] == forms[1]


def test_a_box_covers_the_share_that_the_loss_is_told_of():
    black = np.zeros((200, 10, 10, 1), np.uint8)
    white = black + 255
    images = np.concatenate([black, white])
    examples = image_examples(images, np.repeat([0, 1], 200))
    batches = TrainBatches(
        examples, global_batch_size=400, order=Order(400, 0, shuffle=False), mix=Mix(cutmix=1.0)
    )
    batch = next(batches)
    own = np.abs(batch["image"] - (1 - batch["label"])[:, None, None, None]).mean((1, 2, 3))
    differs = batch["label"] != batch["other_label"]
    np.testing.assert_allclose(own[differs], batch["share"][differs], atol=1e-6)
    assert set(np.unique(batch["image"])) == {0.0, 1.0}
    assert batch["share"].min() < 0.2 < 0.9 < batch["share"].max()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_a_crop_of_whole_numbers_is_that_of_the_same_numbers_rounded(dtype):
    images = stored_images(64).examples.take(np.arange(64))["image"].astype(dtype)
    draws = np.random.default_rng(1).random((64, 5), np.float32)
    want = CropAndFlip()({"image": images.astype(np.float64)}, draws)["image"]
    here = CropAndFlip()({"image": images}, draws)["image"]
    there = jax.jit(CropAndFlip())({"image": images}, draws)["image"]
    assert here.dtype == there.dtype == dtype
    for found in (here, there):
        # A float32 between two whole numbers up to 255 may lie on the other side of their middle.
        assert np.abs(found - want).max() <= 0.5 + 1e-4
    assert np.mean(here != there) < 1e-3


def test_images_are_normalized_by_the_range_of_their_dtype_or_refused():
    values = np.linspace(0, 1, 12).reshape(1, 2, 2, 3)
    for dtype in (np.uint8, np.uint16):
        images = np.rint(values * np.iinfo(dtype).max).astype(dtype)
        want = (images / np.iinfo(dtype).max - 0.5) / 0.25
        for normalized in (Normalize(0.5, 0.25), jax.jit(Normalize(0.5, 0.25))):
            found = normalized({"image": images}, np.zeros((1, 0), np.float32))["image"]
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, want, atol=1e-6)  # some roundings of float32
    for dtype in (np.int32, np.uint32, np.int8, bool, np.float32):
        with pytest.raises(DataError, match=f"image.* {np.dtype(dtype)}.*uint8 or uint16"):
            Normalize()({"image": values.astype(dtype)}, np.zeros((1, 0), np.float32))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("change", [CropAndFlip(), FlipAndShift(2), Mix(0.3), Mix(cutmix=1.0)])
def test_grey_images_may_come_without_a_dim_for_their_channel(change, on_device):
    grey = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, SIZE), dtype=np.uint8)
    options = {"mix": change} if isinstance(change, Mix) else {"transforms": [change]}

    def first(images):
        data = {"image": images, "label": np.arange(SIZE)}
        options.update(global_batch_size=SIZE, seed=0, on_device=on_device)
        batch = next(TrainBatches(data, **options))
        return on_devices(batch) if on_device else batch

    found, want = first(grey), first(grey[..., None])
    np.testing.assert_array_equal(found["image"], want["image"][..., 0])
    assert found.keys() == want.keys()
    np.testing.assert_array_equal(found.get("share"), want.get("share"))


@pytest.mark.parametrize("std", [0, -0.5, float("nan"), [0.2, 0.0, 0.2]])
def test_a_standard_deviation_that_is_not_positive_is_refused(std):
    with pytest.raises(ConfigError, match="normalize: std"):
        normalize(0.5, std)
