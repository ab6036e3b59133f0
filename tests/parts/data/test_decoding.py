"""Images are decoded and scaled by simplejpeg, if they are JPEG in colour, else by Pillow."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from jddp.config.versions import versions
from jddp.data.sources import images
from jddp.data.sources.images import UndecodableError, decode_image


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


def test_the_error_of_a_file_that_is_no_image_is_the_same_each_time():
    with pytest.raises(UndecodableError) as raised:
        decode_image(b"GIF89a?", 24, where="cat.gif")
    assert str(raised.value) == "cat.gif: does not decode (cannot identify image file). Remove it."


def test_versions_name_the_decoders():
    assert versions().keys() >= {"pillow", "simplejpeg"}
