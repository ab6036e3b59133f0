"""Files of data that tests write, and all rows of examples."""

import io
import tarfile

import numpy as np
from PIL import Image


def rows_of(examples):
    return examples.take(np.arange(len(examples)))


def file_of(pixels, form="PNG", **options):
    """The bytes of an image, of an array or of Pillow."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def write_tar(path, members):
    """A tar file of these contents by name."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))


def write_images(folder, files):
    """Files by name, in folders that are made."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
