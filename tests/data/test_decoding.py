"""Images are decoded and scaled by simplejpeg, if they are JPEG in colour, else by Pillow."""

import io
import tarfile

import datasets
import numpy as np
import pytest
from PIL import Image, ImageOps

from jddp.data import make_source
from jddp.data.batches import Share
from jddp.data.sources import images
from jddp.data.sources.images import UndecodableError, decode_image, images_in
from jddp.ground.errors import DataError

SIZE, FIRST = 16, np.array([0])
RNG = np.random.default_rng(0)
GREY, ALPHA = RNG.integers(0, 256, (2, SIZE, SIZE), np.uint8)
COLOUR = RNG.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
DEEP = RNG.integers(0, 2**16, (SIZE, SIZE), np.uint16)  # 16 bits
PALETTE = RNG.integers(0, 256, (256, 3), np.uint8)


def smooth(mode, height=60, width=80):
    y, x = np.mgrid[:height, :width] / 20
    channels = [127 * (1 + np.sin(x * (k + 1) / 2 + y)) for k in range(4)]
    pixels = np.stack(channels, -1).astype(np.uint8)
    wanted = {"L": pixels[..., 0], "RGB": pixels[..., :3], "CMYK": pixels}[mode]
    return Image.fromarray(np.ascontiguousarray(wanted), mode)


def file_of(image, form="JPEG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def by_pillow(file, size):
    image = Image.open(io.BytesIO(file)).convert("RGB")
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR))


def test_a_photograph_is_decoded_as_pillow_does_to_a_few_levels(monkeypatch):
    file = file_of(smooth("RGB"), quality=95, subsampling=0)
    for size in (60, 40, 24):
        differs = np.abs(decode_image(file, size, where="x").astype(int) - by_pillow(file, size))
        # Fractions of the size are averages of eighths, and no filter of Pillow.
        assert differs.max() <= (0 if size == 60 else 8)
    asked = []
    monkeypatch.setattr(images, "import_extra", lambda name, **_: asked.append(name))
    with pytest.raises(AttributeError):
        decode_image(file, 24, where="x")
    assert asked == ["simplejpeg"]


@pytest.mark.parametrize(("mode", "form"), [("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG")])
def test_other_images_are_decoded_by_pillow(mode, form):
    file = file_of(smooth(mode), form)
    np.testing.assert_array_equal(decode_image(file, 24, where="x"), by_pillow(file, 24))


def test_a_jpeg_that_is_cut_or_too_large_is_refused(monkeypatch):
    file = file_of(smooth("RGB"))
    for end in (len(file) // 2, len(file) - 40):
        with pytest.raises(UndecodableError, match="cat.jpg: does not decode"):
            decode_image(file[:end], 24, where="cat.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UndecodableError, match="decompression bomb"):
        decode_image(file, 24, where="cat.jpg")


def on_white(pixels, alpha):
    """Pixels as a white page shows them through this alpha, from 0 to 255."""
    alpha = alpha.reshape(alpha.shape + (1,) * (pixels.ndim - 2)) / 255
    return np.rint(pixels * alpha + 255 * (1 - alpha))


def with_palette():
    image = Image.fromarray(GREY, "P")
    image.putpalette(PALETTE.tobytes())
    return image


def turned(orientation):
    image = Image.fromarray(COLOUR)
    image.getexif()[0x0112] = orientation
    return file_of(image, "PNG", exif=image.getexif())


CMYK = np.dstack([COLOUR, ALPHA])
GREY_ALPHA = Image.fromarray(np.dstack([GREY, ALPHA]), "LA")
COLOUR_ALPHA = Image.fromarray(np.dstack([COLOUR, ALPHA]), "RGBA")
KINDS = {  # each with its pixels by hand
    "grey": (file_of(Image.fromarray(GREY), "PNG"), GREY),
    "colour": (file_of(Image.fromarray(COLOUR), "PNG"), COLOUR),
    "1 bit": (file_of(Image.fromarray(GREY > 99), "PNG"), (GREY > 99) * 255),
    "16 bits": (file_of(Image.fromarray(DEEP), "PNG"), np.rint(DEEP / 257)),
    "16 bits of TIFF": (file_of(Image.fromarray(DEEP), "TIFF"), np.rint(DEEP / 257)),
    "16 bits of TIFF, the higher byte first": (
        file_of(Image.fromarray(DEEP.astype(">u2")), "TIFF"),
        np.rint(DEEP / 257),
    ),
    "16 bits, one value transparent": (
        file_of(Image.fromarray(DEEP), "PNG", transparency=int(DEEP[3, 4])),
        np.where(DEEP[3, 4] == DEEP, 255, np.rint(DEEP / 257)),
    ),
    "floating point": (
        file_of(Image.fromarray((DEEP / 65535).astype(np.float32)), "TIFF"),
        np.rint(DEEP / 257),
    ),
    "grey and alpha": (file_of(GREY_ALPHA, "PNG"), on_white(GREY, ALPHA)),
    "colour and alpha": (file_of(COLOUR_ALPHA, "PNG"), on_white(COLOUR, ALPHA)),
    "colour and alpha of TIFF": (file_of(COLOUR_ALPHA, "TIFF"), on_white(COLOUR, ALPHA)),
    "grey, one value transparent": (
        file_of(Image.fromarray(GREY), "PNG", transparency=int(GREY[3, 4])),
        np.where(GREY[3, 4] == GREY, 255, GREY),
    ),
    "a palette": (file_of(with_palette(), "PNG"), PALETTE[GREY]),
    "a palette, one colour transparent": (
        file_of(with_palette(), "PNG", transparency=int(GREY[3, 4])),
        np.where(GREY[..., None] == GREY[3, 4], 255, PALETTE[GREY]),
    ),
    "a palette with alpha": (
        file_of(with_palette(), "PNG", transparency=bytes(range(256))),
        on_white(PALETTE[GREY], GREY),
    ),
    "CMYK": (
        file_of(Image.fromarray(CMYK, "CMYK"), "TIFF"),
        np.rint((255.0 - COLOUR) * (255.0 - ALPHA[..., None]) / 255),
    ),
    "EXIF 0": (turned(0), COLOUR),
    "EXIF 1": (turned(1), COLOUR),
    "EXIF 9": (turned(9), COLOUR),
    "EXIF 2": (turned(2), COLOUR[:, ::-1]),
    "EXIF 3": (turned(3), COLOUR[::-1, ::-1]),
    "EXIF 4": (turned(4), COLOUR[::-1]),
    "EXIF 5": (turned(5), COLOUR.swapaxes(0, 1)),
    "EXIF 6": (turned(6), np.rot90(COLOUR, -1)),
    "EXIF 7": (turned(7), COLOUR[::-1, ::-1].swapaxes(0, 1)),
    "EXIF 8": (turned(8), np.rot90(COLOUR)),
}


@pytest.mark.parametrize(("file", "want"), KINDS.values(), ids=KINDS)
def test_an_image_of_any_kind_is_decoded_as_by_hand(file, want):
    got = decode_image(file, SIZE, where="x").astype(float)
    # Pillow rounds CMYK twice.
    np.testing.assert_allclose(got, want if want.ndim == 3 else np.dstack([want] * 3), atol=1)
    exact = "CMYK" not in str(Image.open(io.BytesIO(file)).mode)
    assert not exact or np.abs(got - (want if want.ndim == 3 else want[..., None])).max() == 0


@pytest.mark.parametrize("num_dims", [2, 3], ids=["grey", "colour"])
def test_every_source_and_predict_decode_an_image_to_the_same_array(tmp_path, num_dims):
    files = [file for file, pixels in KINDS.values() if pixels.ndim == num_dims]
    if num_dims == 3:
        exif = (photo := smooth("RGB", SIZE, SIZE)).getexif()
        exif[0x0112] = 6
        files.append(file_of(photo, exif=exif))
    write_in_all_formats(tmp_path, files)
    kwargs = {"image_size": SIZE, "mean": 0.0, "std": 1.0}
    scaled = [make_source(x, directory=str(tmp_path), kwargs=kwargs).load().train for x in SCALE]
    predicted = images_in(tmp_path / "train", **kwargs)
    kept = [make_source(x, directory=str(tmp_path)).load().train for x in KEEP]
    stream = make_source("hugging_face", directory=str(tmp_path), kwargs={"streaming": True})
    rows = next(iter(stream.open_streams(len(files), 0, Share(0, 1)).train))["image"]
    for i, file in enumerate(files):
        want = decode_image(file, SIZE, where="x")
        for examples in scaled:
            found = examples.take(np.array([i]))["image"][0] * 255
            np.testing.assert_allclose(found, want, atol=1e-4)  # 255 x 1 / 255 in float32
        found = predicted.take(np.array([i]))["image"][0] * 255
        middle = decode_image(file, SIZE, where="x", margin=images.TEST_MARGIN)
        np.testing.assert_allclose(found, middle, atol=1e-4)
        for found in (rows[i], *(x.take(np.array([i]))["image"][0] for x in kept)):
            assert (found.dtype, found.ndim) == (np.uint8, num_dims)
            np.testing.assert_array_equal(found.reshape(SIZE, SIZE, -1) + 0 * want, want)


SCALE, KEEP = ("image_folder", "webdataset"), ("parquet", "hugging_face")


def write_in_all_formats(folder, files):
    endings = [f"{Image.open(io.BytesIO(file)).format.lower()}" for file in files]
    rows = {"image": [{"bytes": x, "path": None} for x in files], "label": [0] * len(files)}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    for part in ("train", "test"):
        made.to_parquet(str(folder / f"{part}.parquet"))
        made.save_to_disk(str(folder / part))
        (folder / part / "one").mkdir()
        with tarfile.open(folder / f"{part}.tar", "w") as tar:
            for number, (file, ending) in enumerate(zip(files, endings, strict=True)):
                (folder / part / "one" / f"{number:03}.{ending}").write_bytes(file)
                for name, content in (("png", file), ("cls", b"0")):
                    header = tarfile.TarInfo(f"{number:03}.{name}")
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))


def test_a_column_that_names_a_mode_is_decoded_in_that_mode(tmp_path):
    for mode, file, want in (
        ("RGBA", file_of(COLOUR_ALPHA, "PNG"), np.dstack([COLOUR, ALPHA])),
        ("L", KINDS["16 bits"][0], KINDS["16 bits"][1]),
        ("I;16", KINDS["16 bits"][0], DEEP),
    ):
        rows = datasets.Dataset.from_dict({"image": [{"bytes": file, "path": None}] * 2})
        rows = rows.cast_column("image", datasets.Image(mode=mode))
        for part in ("train", "test"):
            rows.save_to_disk(str(tmp_path / mode / part))
        data = make_source("hugging_face", directory=str(tmp_path / mode)).load()
        np.testing.assert_array_equal(data.train.take(np.array([1]))["image"][0], want)


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (DEEP.astype(np.int32), r"int32 from \d+ to \d+"),
        (DEEP.astype(np.float32), r"float32 from \d.* to 6\d{4}"),
        (np.where(DEEP > 9999, 0.5, np.nan).astype(np.float32), "float32 from nan to nan"),
        ((GREY / 255 - 0.5).astype(np.float32), "float32 from -0.5 to 0.5"),
    ],
)
def test_numbers_of_which_none_is_known_to_be_white_are_refused_or_masked(tmp_path, pixels, reason):
    Image.fromarray(pixels).save(tmp_path / "a.tif")
    file = (tmp_path / "a.tif").read_bytes()
    with pytest.raises(UndecodableError, match=rf"a.tif: .*{reason}.* 8 or 16 bits"):
        decode_image(file, SIZE, where="a.tif")
    write_in_all_formats(tmp_path, [file])
    for name in ("image_folder", "parquet"):
        kwargs = {"image_size": SIZE} if name == "image_folder" else {}
        with pytest.raises(DataError, match=reason):
            make_source(name, directory=str(tmp_path), kwargs=kwargs).load().train.take(FIRST)
    kwargs = {"image_size": SIZE, "undecodable": "mask"}
    masked = make_source("image_folder", directory=str(tmp_path), kwargs=kwargs).load().train
    assert masked.take(FIRST)["mask"] == 0


def test_a_photograph_whose_exif_is_damaged_is_decoded_as_it_is_stored():
    plain, damaged = (file_of(smooth("RGB"), exif=exif) for exif in (b"", b"Exif\0\0no TIFF"))
    found = [decode_image(file, 24, where="x") for file in (plain, damaged)]
    np.testing.assert_array_equal(*found)


def test_a_photograph_that_is_scaled_while_it_is_decoded_is_turned_too():
    photo = smooth("RGB", 320, 240)
    plain = file_of(photo, quality=95)
    photo.getexif()[0x0112] = 6
    upright = decode_image(file_of(photo, quality=95, exif=photo.getexif()), 24, where="x")
    np.testing.assert_array_equal(upright, np.rot90(decode_image(plain, 24, where="x"), -1))
