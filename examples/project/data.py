"""The data: training and test examples, as dicts of arrays with a row for each example.

Put your own in their place. These are drawn: noise with a bar, which lies (0) or stands (1).
"""

import numpy as np


def load(num_train=1600, num_test=400, size=16):
    """Returns (train, test); the arguments are `data.kwargs` of the config."""
    return draw(num_train, size, seed=0), draw(num_test, size, seed=1)


def draw(num_images, size, seed):
    """Images `(n, size, size, 3)` and their labels `(n,)`."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(num_images, size, size, 3)).astype(np.float32)
    labels = rng.integers(2, size=num_images).astype(np.int32)
    for image, label in zip(images, labels, strict=True):
        place = rng.integers(size)
        (image[:, place] if label else image[place])[:] += 2
    return {"image": images, "label": labels}
