"""Images in a page: arrays as PNG inside of the HTML, so that the page stays one file."""

import base64
import struct
import zlib
from html import escape

import numpy as np

MOST_PIXELS = 96  # of a side; larger images are drawn by every second, third, ... pixel


def picture(pixels: np.ndarray, about: str) -> str:
    """Returns an element with an image, from the darkest to the brightest of its values.

    Args:
      pixels: Values `(height, width)`, `(height, width, 1)` or `(height, width, 3)`.
      about: Words for a reader who does not see it.
    """
    every = -(-max(pixels.shape[:2]) // MOST_PIXELS)
    values = np.nan_to_num(pixels[::every, ::every].astype(np.float32))
    scaled = (values - values.min()) * (255 / max(float(np.ptp(values)), 1e-9))
    encoded = base64.b64encode(_png(scaled.astype(np.uint8).reshape(*values.shape[:2], -1)))
    return f'<img alt="{escape(about)}" src="data:image/png;base64,{encoded.decode()}">'


def _png(pixels: np.ndarray) -> bytes:
    """A PNG of bytes `(height, width, 1 or 3)`."""
    height, width, num_channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    # Bits of a value, kind of color (0 gray, 2 RGB), and the only compression, filter and order.
    head = struct.pack(">2I5B", width, height, 8, 2 if num_channels == 3 else 0, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 9)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", data), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
