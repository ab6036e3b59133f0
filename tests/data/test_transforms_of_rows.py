"""Transforms of rows: the images by hand, and the same numbers on the host and on devices."""

import jax
import numpy as np
import pytest
from states import equal

from jddp.data import ArrayExamples, TrainBatches, eval_batches
from jddp.data.examples import Concatenated, Subset
from jddp.data.sources.arrays import image_examples
from jddp.data.transforms import Chain, CropAndFlip, FlipAndShift, Normalize, as_stored, normalize
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import TRANSFORM

SIZE = 12


def stored_images(num=64):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, SIZE, SIZE, 3), dtype=np.uint8)
    return image_examples(images, np.arange(num), mean=[0.4, 0.5, 0.6], std=0.25)


def batches_of(**options):
    return TrainBatches(stored_images(), global_batch_size=32, seed=3, **options)


def on_devices(batch):
    """The batch as a compiled step transforms it."""
    batch = dict(batch)
    return jax.jit(batch.pop(TRANSFORM))(batch)


def test_flips_and_shifts_move_whole_images_and_repeat_the_edge():
    image = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    batch = {"image": np.repeat(image, 4, axis=0), "label": np.arange(4)}
    # Thirds of the range move by -1, 0 and 1 pixels, down and right; its lower half mirrors.
    uniform = np.array([[0.5, 0.5, 0.1], [0.9, 0.5, 0.9], [0.5, 0.1, 0.9], [0.5, 0.9, 0.1]])
    moved = FlipAndShift(1)(batch, uniform)
    mirrored, down = [[2, 1, 0], [5, 4, 3], [8, 7, 6]], [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    right, both = [[1, 2, 2], [4, 5, 5], [7, 8, 8]], [[2, 2, 1], [5, 5, 4], [8, 8, 7]]
    assert moved["image"][..., 0].tolist() == [mirrored, down, right, both]
    equal((moved["label"], batch["image"]), (batch["label"], np.repeat(image, 4, axis=0)))


def test_a_crop_enlarges_a_part_and_mirrors_it():
    ramp = np.arange(8, dtype=np.float32)
    image = np.broadcast_to(ramp[:, None, None] * 10 + ramp[:, None], (8, 8, 1))
    batch = {"image": np.stack([image] * 3), "label": np.arange(3)}
    # All of it; mirrored; a quarter, from the lower left.
    uniform = np.array([[1, 0.5, 0, 0, 0.9], [1, 0.5, 0, 0, 0.1], [0, 0.5, 1, 0, 0.9]])
    whole, mirrored, part = CropAndFlip(smallest=0.25)(batch, uniform)["image"]
    np.testing.assert_allclose(whole, image, atol=1e-5)
    np.testing.assert_allclose(mirrored, image[:, ::-1], atol=1e-5)
    places = (np.arange(8) + 0.5) / 2 - 0.5
    want = np.clip(places + 4, 0, 7)[:, None] * 10 + np.clip(places, 0, 7)
    np.testing.assert_allclose(part[:, :, 0], want, atol=1e-4)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_a_crop_of_whole_numbers_is_that_of_the_same_numbers_rounded(dtype):
    images = np.random.default_rng(0).integers(0, 256, (64, SIZE, SIZE, 3)).astype(dtype)
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
    for std in (0, -0.5, float("nan"), [0.2, 0.0, 0.2]):
        with pytest.raises(ConfigError, match="normalize: std"):
            normalize(0.5, std)


@pytest.mark.parametrize("changes", [[], [FlipAndShift(2)], [CropAndFlip(), FlipAndShift(1)]])
def test_rows_transformed_on_devices_are_the_rows_of_the_host(changes):
    here, there = (batches_of(on_device=x, transforms=changes) for x in (False, True))
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


def test_examples_are_read_as_they_are_stored_below_any_choice_of_them():
    examples = stored_images()
    part = Subset(examples, np.array([5, 2]))
    both = Concatenated([examples, part])
    for chosen, rows in ((examples, [3, 6]), (part, [0, 1]), (both, [3, 65])):
        stored, chain = as_stored(chosen)
        assert stored.take(np.array(rows))["image"].dtype == np.uint8
        equal(chain(stored.take(np.array(rows))), chosen.take(np.array(rows)))
    other = image_examples(np.zeros((2, SIZE, SIZE, 3), np.uint8), np.arange(2))  # of other scale
    assert as_stored(Concatenated([examples, other]))[1] == Chain()
    plain = ArrayExamples({"x": np.arange(3)})
    assert as_stored(plain) == (plain, Chain())
    tests = eval_batches(examples, global_batch_size=64, transforms=[CropAndFlip()])
    equal([*tests], [examples.take(np.arange(64))])  # which draw nothing


@pytest.mark.parametrize("options", [{}, {"num_epochs": 0.8}, {"multiple_of": 7}], ids=str)
def test_the_example_has_the_form_and_the_function_of_all_batches(options):
    batches = batches_of(on_device=True, transforms=[CropAndFlip()], **options)
    batch, example = next(batches), batches.example
    assert batch.pop(TRANSFORM) == example.pop(TRANSFORM)
    forms = [{name: (x.dtype, x.shape[1:]) for name, x in y.items()} for y in (batch, example)]
    assert forms[0] == forms[1]
    plain = TrainBatches({"x": np.arange(8)}, global_batch_size=4, seed=0, on_device=True)
    assert next(plain).keys() == {"x"}


@pytest.mark.parametrize("change", [CropAndFlip(), FlipAndShift(2)])
def test_grey_images_may_come_without_a_dim_for_their_channel(change):
    grey = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, SIZE), dtype=np.uint8)
    draws = np.random.default_rng(1).random((SIZE, change.num_draws), np.float32)
    for function in (change, jax.jit(change)):
        found, want = (function({"image": x}, draws)["image"] for x in (grey, grey[..., None]))
        np.testing.assert_array_equal(found, want[..., 0])
