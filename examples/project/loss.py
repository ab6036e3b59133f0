"""The loss: a value for each row, which jddp averages over all rows of all devices."""

import optax


def loss_fn(model, batch, train):
    """Returns the losses `(b,)` of the rows of one replica, and metrics of the same form."""
    logits = model(batch["image"], train=train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}
