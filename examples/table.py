"""A table from a CSV file: numbers are scaled, and a category gets an embedding.

    python examples/table.py                # made-up flats
    python examples/table.py houses.csv     # yours, with the columns area, rooms, city and price

`fit` takes the arrays that `encoded` makes of rows. What is learned from the training rows, means,
deviations and the list of cities, encodes the rows of a prediction too.
"""

import csv
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jddp

NUMBERS, CATEGORY, TARGET = ("area", "rooms"), "city", "price"


class Tabular(nn.Module):
    """An MLP over the numbers and an embedding of the category."""

    num_categories: int

    @nn.compact
    def __call__(self, numbers, category):
        """Returns (b,) for numbers (b, columns) and a category (b,)."""
        inputs = jnp.concatenate([numbers, nn.Embed(self.num_categories, 4)(category)], axis=1)
        return nn.Dense(1)(nn.relu(nn.Dense(32)(inputs)))[:, 0]


def loss_fn(model, batch):
    """Returns every row's squared error, in standard deviations of the target."""
    return (model(batch["numbers"], batch["category"]) - batch["target"]) ** 2


def made_up(num=2000):
    """Rows as `csv.DictReader` reads them: a price that depends on area, rooms and city."""
    rng = np.random.default_rng(0)
    for _ in range(num):
        area, rooms, city = rng.uniform(20, 150), rng.integers(1, 6), rng.choice(["Ulm", "Rom"])
        price = 3 * area + 20 * rooms + 100 * (city == "Rom") + rng.normal(0, 10)
        yield {"area": area, "rooms": rooms, "city": city, "price": price}


def numbers_of(rows, names):
    """Returns the columns as float32, (rows, columns)."""
    return np.array([[float(row[name]) for name in names] for row in rows], np.float32)


def main():
    """Trains on four fifths of the rows, and prints the error on the others."""
    lines = Path(sys.argv[1]).read_text().splitlines() if len(sys.argv) > 1 else None
    rows = [*(made_up() if lines is None else csv.DictReader(lines))]
    train, test = rows[len(rows) // 5 :], rows[: len(rows) // 5]
    columns = numbers_of(train, (*NUMBERS, TARGET))
    mean, deviation = columns.mean(0), columns.std(0)
    cities = sorted({row[CATEGORY] for row in train})

    def encoded(rows):
        values = (numbers_of(rows, (*NUMBERS, TARGET)) - mean) / deviation
        category = np.array([cities.index(row[CATEGORY]) for row in rows], np.int32)
        return {"numbers": values[:, :-1], "category": category, "target": values[:, -1]}

    ddp = jddp.DataParallel(Tabular(len(cities)), optax.adam(1e-2), loss_fn)
    options = {"global_batch_size": 64, "num_epochs": 10, "evaluate": encoded(test)}
    error = jddp.fit(ddp, encoded(train), **options).evaluate()["loss"]
    print(f"loss {error:.3f}: {np.sqrt(error) * deviation[-1]:.1f} of {TARGET} on {len(test)} rows")


if __name__ == "__main__":
    main()
