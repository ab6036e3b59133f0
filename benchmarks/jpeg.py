"""Times decoders of JPEG: Pillow, and jddp, which decodes by simplejpeg.

python benchmarks/jpeg.py --rounds 15

Both decode, scale and crop the same files, in turn; the numbers are seconds of the processor.
"""

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from data import machine, photo_like
from PIL import Image, ImageOps

from jddp.data.sources.images import decode_image

NUM_FILES = 8


def main() -> None:
    """Prints milliseconds an image, and how many times as fast jddp is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    num_rounds = parser.parse_args().rounds
    found = {}
    for shape in ((375, 500), (1500, 2000)):
        files = photos(shape)
        for size in (224, 64):
            found[f"{shape[1]} x {shape[0]} to {size}"] = compare(files, size, num_rounds)
    for name, (pillow, jddp, gain) in found.items():
        print(f"{name:20} Pillow {pillow:6.2f} ms   jddp {jddp:6.2f} ms   {gain:.2f} times as fast")
    print(json.dumps({**machine(), "results": found}))


def photos(shape: tuple[int, int]) -> list[bytes]:
    """Files of pictures of this height and width."""
    rng = np.random.default_rng(0)
    files = [io.BytesIO() for _ in range(NUM_FILES)]
    for file in files:
        Image.fromarray(photo_like(rng, shape)).save(file, "JPEG", quality=90)
    return [file.getvalue() for file in files]


def compare(files: list[bytes], size: int, num_rounds: int) -> tuple[float, float, float]:
    """Milliseconds of Pillow and of jddp for an image, and the median ratio."""
    pairs = [
        (
            processor_time(lambda: [by_pillow(file, size) for file in files]),
            processor_time(lambda: [decode_image(file, size, where="") for file in files]),
        )
        for _ in range(num_rounds)
    ]
    pillow, jddp = (1e3 * statistics.median(x) / NUM_FILES for x in zip(*pairs, strict=True))
    return pillow, jddp, statistics.median(a / b for a, b in pairs)


def by_pillow(file: bytes, size: int) -> np.ndarray:
    """The image, decoded at a half, a quarter or an eighth of its size if that suffices."""
    with Image.open(io.BytesIO(file), formats=("JPEG",)) as image:
        wanted = size / min(image.size)
        if wanted <= 0.5:
            image.draft("RGB", (round(image.width * wanted), round(image.height * wanted)))
        kernel = Image.Resampling.BILINEAR
        return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), kernel))


def processor_time(run: Callable[[], object]) -> float:
    """Seconds of the processor for a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
