"""Continues sequences of tokens with the language model of a run.

    tokens = sample(run, [100, 101, 102], 200, length=128)     # any run whose model scores tokens
    both = sample_each(run, [[100], [101, 102]], 200, length=128)

It is simple and exact: for each token the model reads the whole window again, which is as long as a
training sequence. Nothing is cached between tokens. The state of the run is read and not changed,
and the random numbers are drawn on the host.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jddp.errors import ConfigError, UsageError
from jddp.trainer.run import Run
from jddp.typing import Batch
from jddp.zoo.losses import Model, call_model

Tokens = Sequence[int] | np.ndarray


def sample(run: Run, tokens: Tokens, num_tokens: int = 100, **options: Any) -> list[int]:
    """Returns tokens and their continuation by the model of a run.

    Args:
      run: A run whose model returns logits `(b, t, vocab)` for "tokens" `(b, t)`, each position
        computed from earlier ones.
      tokens: One token or more.
      num_tokens: Number of tokens to add.
      **options: The length of sequences, and what else `sample_each` takes.

    Raises:
      UsageError: If an argument breaks its rule.
      ConfigError: If the model returns no such logits.
    """
    return sample_each(run, [tokens], num_tokens, **options)[0]


def sample_each(
    run: Run,
    prompts: Sequence[Tokens],
    num_tokens: int,
    *,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Returns several sequences of tokens, each with its continuation, which is that of it alone.

    In a job of several processes all of them call it.

    Args:
      run: A run, as for `sample`.
      prompts: Sequences of one token or more.
      num_tokens: Number of tokens to add to each.
      length: Length of the longest sequence that the model sees: the last tokens of a longer one.
      temperature: Divisor of the logits; 0 takes the most likely token.
      seed: Seed of the random choices of each sequence.
      vocab_size: Number of tokens to choose from; by default all tokens of the model.

    Raises:
      UsageError: If an argument breaks its rule.
      ConfigError: If the model returns no such logits.
    """
    for prompt in prompts:
        check_sampling(len(prompt), num_tokens, temperature, seed)
    found = [[int(token) for token in prompt] for prompt in prompts]
    draws = [np.random.default_rng(seed) for _ in prompts]
    for _ in range(num_tokens):
        logits = next_logits(run, found, length=length)
        check_vocabulary(vocab_size, logits.shape[1])
        for tokens, scores, rng in zip(found, logits[:, :vocab_size], draws, strict=True):
            # The largest of logits with Gumbel noise is distributed as their softmax.
            noise = rng.gumbel(size=len(scores))
            tokens.append(int((scores / temperature + noise if temperature else scores).argmax()))
    return found


def check_sampling(num_given: int, num_tokens: int, temperature: float, seed: int) -> None:
    """Refuses what cannot be sampled.

    Raises:
      UsageError: If there is no token to continue or to add, or another number is negative.
    """
    if num_given < 1 or num_tokens < 1 or not 0 <= temperature < np.inf or seed < 0:
        raise UsageError(
            f"The prompt has {num_given} tokens, num_tokens is {num_tokens}, temperature "
            f"{temperature} and seed {seed}: the first two must be at least 1, the others at least "
            "0."
        )


def check_vocabulary(vocab_size: int | None, num_logits: int) -> None:
    """Refuses more tokens than a model scores.

    Raises:
      ConfigError: If there are more.
    """
    if vocab_size is not None and vocab_size > num_logits:
        raise ConfigError(
            f"The tokenizer has {vocab_size:,} tokens, but the model {num_logits:,}. Give the "
            "tokenizer of the run's data."
        )


def next_logits(
    run: Run, sequences: Sequence[Tokens], *, length: int
) -> Float[np.ndarray, "b vocab"]:
    """The logits of the token that follows each sequence, in float64.

    Raises:
      ConfigError: If the model returns no logits `(b, t, vocab)`.
    """
    windows = [np.asarray(tokens[-length:], np.int32) for tokens in sequences]
    rows = [np.pad(window, (0, length - window.size)) for window in windows]  # compiled once
    last = np.array([window.size - 1 for window in windows], np.int32)
    logits = run.predict([{"tokens": np.stack(rows), "last": last}], _logits_of_next)
    return np.asarray(logits, np.float64)


def _logits_of_next(model: Model, batch: Batch) -> Float[Array, "b vocab"]:
    """The logits of the token after the last of each row."""
    logits = call_model(model, batch["tokens"], train=False)
    if logits.ndim != 3:
        raise ConfigError(f"The model returns logits of shape {logits.shape}, not (b, t, vocab).")
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0]
