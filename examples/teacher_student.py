"""Distillation: a small network learns from a large one, without labels.

    python examples/teacher_student.py

The teacher is a tree of weights and statistics. It is passed to the student's loss as `constants=`:
complete on every replica, neither split nor differentiated, and no part of the student's state, of
its gradients or of its checkpoints.
"""

import jax
import optax
from flax import linen as nn

import jddp
from jddp.data import TrainBatches, eval_batches, make_source


class Mlp(nn.Module):
    """Dense layers with batch norm."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, x, train=False):
        """Returns logits (b, 10) for images."""
        x = x.reshape(len(x), -1)
        for _ in range(self.depth):
            x = nn.Dense(self.width, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x)


TEACHER, STUDENT = Mlp(width=256, depth=2), Mlp(width=32, depth=1)
TEMPERATURE = 3.0


def labelled_loss(model, batch, train):
    """The loss of the teacher."""
    logits = model(batch["image"], train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def distilled_loss(model, batch, train, constants):
    """The divergence of the student's probabilities from the teacher's.

    Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, section 2.
    """
    target = TEACHER.apply(constants, batch["image"])
    logits = model(batch["image"], train)
    losses = optax.losses.kl_divergence(
        nn.log_softmax(logits / TEMPERATURE), nn.softmax(target / TEMPERATURE)
    )
    return TEMPERATURE**2 * losses, {"agrees": logits.argmax(-1) == target.argmax(-1)}


def judge(model, batch, train, constants):
    """Accuracy, by labels, and agreement with the teacher, in evaluation."""
    logits, target = model(batch["image"], train), TEACHER.apply(constants, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    guess = logits.argmax(-1)
    return losses, {"accuracy": guess == batch["label"], "agrees": guess == target.argmax(-1)}


def main(num_steps=300):
    """Trains both; returns the test accuracies of both, and their agreement."""
    data = make_source("fashion_mnist").load()
    batches = TrainBatches(data.train, global_batch_size=256, seed=0)
    test_batches = eval_batches(data.test, global_batch_size=2000)

    ddp = jddp.DataParallel(TEACHER, optax.adam(2e-3), labelled_loss)
    taught = jddp.fit(ddp, batches, num_steps=num_steps, evaluate=test_batches)
    teacher = ddp.model(taught.state)

    ddp = jddp.DataParallel(STUDENT, optax.adam(5e-3), distilled_loss, eval_fn=judge)
    unlabelled = ({"image": batch["image"]} for batch in batches)
    learned = jddp.fit(
        ddp.with_constants(teacher), unlabelled, num_steps=num_steps, evaluate=test_batches
    )
    ends = {name: learned.eval_metrics[name] for name in ("accuracy", "agrees")}
    return {"teacher": taught.eval_metrics["accuracy"], **ends}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
