"""Images: decoded to the same array from each format, in folders of classes, or refused."""

import io
import os

import datasets
import numpy as np
import pytest
from data_files import file_of, rows_of, write_images, write_tar
from PIL import Image, ImageOps

from jddp.data import make_source
from jddp.data.batches import Share
from jddp.data.source import spec_of
from jddp.data.sources import images
from jddp.data.sources.images import decode_image, images_in
from jddp.ground.errors import DataError

SIZE, FIRST = 16, np.array([0])
RNG = np.random.default_rng(0)
GREY, ALPHA = RNG.integers(0, 256, (2, SIZE, SIZE), np.uint8)
COLOUR = RNG.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
DEEP = RNG.integers(0, 2**16, (SIZE, SIZE), np.uint16)  # 16 bits
IN_8_BITS = np.rint(DEEP / 257)
PALETTE = RNG.integers(0, 256, (256, 3), np.uint8)


def smooth(height=60, width=80):
    y, x, k = np.mgrid[:height, :width, :3]
    return Image.fromarray((127 * (1 + np.sin(x * (k + 1) / 40 + y / 20))).astype(np.uint8))


def by_pillow(file, size):
    image = Image.open(io.BytesIO(file)).convert("RGB")
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR))


def test_a_photograph_is_decoded_as_pillow_does_to_a_few_levels_and_turned_by_sound_exif():
    file = file_of(smooth(), "JPEG", quality=95, subsampling=0)
    for size in (60, 40, 24):
        differs = np.abs(decode_image(file, size, where="x").astype(int) - by_pillow(file, size))
        # Fractions of the size are averages of eighths, and no filter of Pillow.
        assert differs.max() <= (0 if size == 60 else 8)
    photo = turned(smooth(320, 240), 6)  # It is scaled while it is decoded.
    tags = b"", photo.getexif(), b"Exif\0\0no TIFF"
    plain, upright, damaged = (
        decode_image(file_of(photo, "JPEG", quality=95, exif=x), 24, where="x") for x in tags
    )
    np.testing.assert_array_equal(upright, np.rot90(plain, -1))
    np.testing.assert_array_equal(damaged, plain)


def test_an_image_that_is_cut_too_large_or_of_unknown_white_is_refused(monkeypatch):
    for pixels in (DEEP.astype(np.int32), DEEP.astype(np.float32)):
        with pytest.raises(DataError, match=r"a\.tif: .*8 or 16 bits"):
            decode_image(file_of(pixels, "TIFF"), SIZE, where="a.tif")
    file = file_of(smooth(), "JPEG")
    with pytest.raises(DataError, match="cat.jpg"):
        decode_image(file[: len(file) - 40], 24, where="cat.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="bomb"):
        decode_image(file, 24, where="cat.jpg")


def on_white(pixels, alpha):
    """Pixels as a white page shows them through this alpha, from 0 to 255."""
    alpha = alpha.reshape(alpha.shape + (1,) * (pixels.ndim - 2)) / 255
    return np.rint(pixels * alpha + 255 * (1 - alpha))


def kind(image, want, form="PNG", **options):
    """A file, and its pixels by hand."""
    return file_of(image, form, **options), want


def with_palette():
    image = Image.fromarray(GREY, "P")
    image.putpalette(PALETTE.tobytes())
    return image


def turned(image, orientation):
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.getexif()[0x0112] = orientation
    return image


ONE, ONE_DEEP = int(GREY[3, 4]), int(DEEP[3, 4])  # the transparent value
WITH_ONE = np.where(DEEP == ONE_DEEP, 255, IN_8_BITS)
KINDS = {
    "grey": kind(GREY, GREY),
    "colour": kind(COLOUR, COLOUR),
    "1 bit": kind(GREY > 99, (GREY > 99) * 255),
    "16 bits": kind(DEEP, IN_8_BITS),
    "16 bits of TIFF, the higher byte first": kind(DEEP.astype(">u2"), IN_8_BITS, "TIFF"),
    "16 bits, one value transparent": kind(DEEP, WITH_ONE, transparency=ONE_DEEP),
    "grey and alpha": kind(np.dstack([GREY, ALPHA]), on_white(GREY, ALPHA)),
    "colour and alpha": kind(np.dstack([COLOUR, ALPHA]), on_white(COLOUR, ALPHA)),
    "a palette, one colour transparent": kind(
        with_palette(), np.where(GREY[..., None] == ONE, 255, PALETTE[GREY]), transparency=ONE
    ),
    "a palette with alpha": kind(
        with_palette(), on_white(PALETTE[GREY], GREY), transparency=bytes(range(256))
    ),
    "CMYK": kind(
        Image.fromarray(np.dstack([COLOUR, ALPHA]), "CMYK"),
        np.rint((255.0 - COLOUR) * (255.0 - ALPHA[..., None]) / 255),
        "TIFF",
    ),
}
TURNED = {0: COLOUR, 1: COLOUR, 9: COLOUR, 2: COLOUR[:, ::-1], 3: COLOUR[::-1, ::-1]}
TURNED |= {4: COLOUR[::-1], 5: COLOUR.swapaxes(0, 1), 6: np.rot90(COLOUR, -1)}
TURNED |= {7: COLOUR[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(COLOUR)}
for number, want in TURNED.items():
    image = turned(COLOUR, number)
    KINDS[f"EXIF {number}"] = kind(image, want, exif=image.getexif())


@pytest.mark.parametrize("name", KINDS)
def test_an_image_of_any_kind_is_decoded_as_by_hand(name):
    file, want = KINDS[name]
    got = decode_image(file, SIZE, where="x").astype(float)
    want = want if want.ndim == 3 else np.dstack([want] * 3)
    np.testing.assert_allclose(got, want, atol=name == "CMYK")  # which Pillow rounds twice


@pytest.mark.parametrize("num_dims", [2, 3], ids=["grey", "colour"])
def test_every_source_and_predict_decode_an_image_to_the_same_array(tmp_path, num_dims):
    files = [file for file, pixels in KINDS.values() if pixels.ndim == num_dims]
    if num_dims == 3:
        photo = turned(smooth(SIZE, SIZE), 6)
        files.append(file_of(photo, "JPEG", exif=photo.getexif()))
    write_in_all_formats(tmp_path, files)
    kwargs = {"image_size": SIZE, "mean": 0.0, "std": 1.0}
    scaled = [
        make_source(name, directory=str(tmp_path), kwargs=kwargs).load().train
        for name in ("image_folder", "webdataset")
    ]
    predicted = images_in(tmp_path / "train", **kwargs)
    kept = make_source("hugging_face", directory=str(tmp_path)).load().train
    stream = make_source("hugging_face", directory=str(tmp_path), kwargs={"streaming": True})
    rows = next(iter(stream.open_streams(len(files), 0, Share(0, 1)).train))["image"]
    want, middle = (
        np.stack([decode_image(file, SIZE, where="x", margin=margin) for file in files])
        for margin in (0, images.TEST_MARGIN)
    )
    for examples, pixels in ((scaled[0], want), (scaled[1], want), (predicted, middle)):
        # 255 x 1 / 255 in float32
        np.testing.assert_allclose(rows_of(examples)["image"] * 255, pixels, atol=1e-4)
    for found in (rows, rows_of(kept)["image"]):
        assert (found.dtype, found.ndim) == (np.uint8, num_dims + 1)
        np.testing.assert_array_equal(found.reshape(*want.shape[:3], -1) + 0 * want, want)


def write_in_all_formats(folder, files):
    rows = {"image": [{"bytes": x, "path": None} for x in files], "label": [0] * len(files)}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    for part in ("train", "test"):
        made.save_to_disk(str(folder / part))
        write_images(folder / part / "one", {f"{i:03}.png": x for i, x in enumerate(files)})
        members = [(f"{i:03}.png", f"{i:03}.cls", x) for i, x in enumerate(files)]
        samples = {name: x for png, cls, file in members for name, x in ((png, file), (cls, b"0"))}
        write_tar(folder / f"{part}.tar", samples)


MODES = [("RGBA", KINDS["colour and alpha"][0], np.dstack([COLOUR, ALPHA]))]
MODES += [("L", *KINDS["16 bits"]), ("I;16", KINDS["16 bits"][0], DEEP)]


@pytest.mark.parametrize(("mode", "file", "want"), MODES, ids=["RGBA", "L", "I;16"])
def test_a_column_that_names_a_mode_is_decoded_in_that_mode(tmp_path, mode, file, want):
    rows = datasets.Dataset.from_dict({"image": [{"bytes": file, "path": None}] * 2})
    rows = rows.cast_column("image", datasets.Image(mode=mode))
    for part in ("train", "test"):
        rows.save_to_disk(str(tmp_path / part))
    data = make_source("hugging_face", directory=str(tmp_path)).load()
    np.testing.assert_array_equal(data.train.take(np.array([1]))["image"][0], want)


def test_the_middle_of_an_image_is_kept_and_its_shorter_side_scaled():
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 2:4], pixels[:, 4:6] = 100, 200
    file = file_of(pixels)
    assert decode_image(file, 4, where="x")[0, :, 0].tolist() == [100, 100, 200, 200]
    assert decode_image(file, 2, margin=0.5, where="x")[0, :, 0].tolist() == [100, 200]
    # A large JPEG decodes as a small one.
    y, x = np.mgrid[:512, :640] / 4
    large = file_of(np.stack([y, x, y], -1).astype(np.uint8), "JPEG", quality=95)
    small = decode_image(large, 32, margin=0.125, where="x").astype(float)
    wide = 512 * 0.875
    middle = np.broadcast_to((np.arange(32) + 0.5) * wide / 32, (32, 32))
    np.testing.assert_allclose(small[:, :, 0], ((512 - wide) / 2 + middle.T) / 4, atol=2)
    np.testing.assert_allclose(small[:, :, 1], ((640 - wide) / 2 + middle) / 4, atol=2)


def grey(value, *shape):
    return np.full(shape, value, np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Two classes: grey of 40 and of 200, of several formats and sizes."""
    for part in ("train", "test"):
        for name, value in (("dark", 40), ("light", 200)):
            files = {"a.png": file_of(grey(value, 20, 30, 3))}
            files["b.jpg"] = file_of(grey(value, 64, 48, 3), "JPEG", quality=95)
            files["deep/c.bmp"] = file_of(grey(value, 10, 10), "BMP")
            write_images(tmp_path / part / name, files)
    return tmp_path


def source_in(folder, **kwargs):
    return make_source("image_folder", directory=str(folder), kwargs={"image_size": 8} | kwargs)


def test_images_in_folders_have_the_class_of_their_folder(folder):
    source = source_in(folder, mean=0.0, std=1.0)
    data = source.load()
    assert spec_of(data.train) == source.spec
    for examples in (data.train, data.test):
        rows = rows_of(examples)
        assert rows["label"].tolist() == [0, 0, 0, 1, 1, 1]
        greys = np.where(rows["label"] == 0, 40, 200) / 255
        np.testing.assert_allclose(rows["image"].mean((1, 2, 3)), greys, atol=2 / 255)  # JPEG's
    assert source.load().sha256 == data.sha256  # of names and sizes
    (folder / "test" / "dark" / "a.png").write_bytes(b"another size")
    assert source.load().sha256 != data.sha256


@pytest.mark.parametrize(
    ("message", "options", "change"),
    [
        ("mean has 2 numbers", {"mean": [0.5, 0.5]}, id),
        ("folders train and test", {"test_share": 0.2}, id),
        ("other: no images", {}, lambda x: (x / "train/other").mkdir()),
        ("'light' is in test", {}, lambda x: (x / "train/light").rename(x / "light")),
        ("test: no folders", {}, lambda x: (x / "test").rename(x / "tset")),
    ],
)
def test_bad_image_folders_are_refused(folder, message, options, change):
    change(folder)
    with pytest.raises(DataError, match=message):
        source_in(folder, **options).load()


def test_a_folder_of_classes_is_split_by_the_names_of_its_files(tmp_path):
    for name in ("dark", "light"):
        files = {f"{number}.png": file_of(grey(0, 8, 8, 3)) for number in range(40)}
        write_images(tmp_path / name, files)
    (tmp_path / ".cache").mkdir()
    source = source_in(tmp_path, test_share=0.25)
    data = source.load()
    assert (source.sizes, data.classes) == ({"num_classes": 2}, ("dark", "light"))
    train, test = {*data.train.files}, {*data.test.files}
    assert len(train) + len(test) == len(train | test) == 80
    assert 8 <= len(test) <= 32  # 20 on average
    write_images(tmp_path / "dark", {"more.png": file_of(grey(0, 8, 8, 3))})
    again = source_in(tmp_path, test_share=0.25).load()
    assert train <= {*again.train.files}
    assert test <= {*again.test.files}


def test_names_that_are_not_utf_8_are_read_and_shown(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    for part in ("train", "test"):
        write_images(tmp_path / part / name, {f"{name}.png": file_of(COLOUR)})
    write_images(tmp_path / "train" / name, {f"{name}.jpg": b"no image"})
    data = source_in(tmp_path).load()
    assert data.classes == (name,)
    with pytest.raises(DataError, match=r"caf.*\.jpg: not a whole image"):
        rows_of(data.train)
