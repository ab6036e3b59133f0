"""Continues a text with the language model of a saved run.

    run = jddp.open_run("runs/gpt_stdlib", mesh=1)
    print(continue_text(run, "def ", num_tokens=200, temperature=0.8))
    tokens = sample(run, [100, 101, 102], 200, length=128)     # any run whose model scores tokens

It is simple and exact: for each token the model reads the whole window again, which is as long as a
training sequence. Nothing is cached between tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jddp.config.schema import Config
from jddp.data.sources.tokenize import BYTES, tokenizer_in
from jddp.errors import ConfigError, UsageError
from jddp.job.parts import find_source
from jddp.trainer.run import Run
from jddp.typing import Batch
from jddp.zoo.losses import Model, call_model


def continue_text(run: Run, prompt: str, *, tokenizer: Path | None = None, **sampling: Any) -> str:
    """Returns a prompt and its continuation by the model of a run with a config.

    Args:
      run: The run, such as `jddp.open_run(run_dir, mesh=1)`.
      prompt: Text to continue, of one token or more.
      tokenizer: A Hugging Face tokenizer file, for a run on tokens that are not bytes.
      **sampling: Number of tokens, temperature and seed, as in `sample`.

    Raises:
      UsageError: If the run's data is not text, or an argument breaks its rule.
      ConfigError: If a tokenizer is missing, cannot be read, or does not fit the model.
    """
    config = Config(**run.config) if run.config else None
    source = find_source(config) if config and config.data.name else None
    if source is None or "tokens" not in source.spec:
        raise UsageError(
            f"--prompt: {run.run_dir} was not trained on tokens that jddp can read (data.name). "
            "Use --data; or call jddp.runs.sampling.sample with your own tokens."
        )
    coder = BYTES if tokenizer is None else tokenizer_in(tokenizer)
    if tokenizer is None and source.sizes.get("vocab_size") != BYTES.vocab_size:
        raise ConfigError("--prompt: the run's tokens are not bytes. Give --tokenizer FILE.")
    length, size = source.spec["tokens"][0][0] - 1, coder.vocab_size
    tokens = sample(run, coder.encode(prompt), length=length, vocab_size=size, **sampling)
    return coder.decode(tokens)


def sample(
    run: Run,
    tokens: Sequence[int] | np.ndarray,
    num_tokens: int = 100,
    *,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[int]:
    """Returns tokens and their continuation by the model of a run.

    Args:
      run: A run whose model returns logits `(b, t, vocab)` for "tokens" `(b, t)`, each position
        computed from earlier ones.
      tokens: One token or more.
      num_tokens: Number of tokens to add.
      length: Length of the longest sequence that the model sees: the last tokens of a longer one.
      temperature: Divisor of the logits; 0 takes the most likely token.
      seed: Seed of the random choices.
      vocab_size: Number of tokens to choose from; by default all tokens of the model.

    Raises:
      UsageError: If an argument breaks its rule.
      ConfigError: If the model returns no such logits.
    """
    found = [int(token) for token in tokens]
    if not found or num_tokens < 1 or not 0 <= temperature < np.inf:
        raise UsageError(
            f"The prompt has {len(found)} tokens, num_tokens is {num_tokens} and temperature "
            f"{temperature}: the first two must be at least 1, and temperature at least 0."
        )
    rng = np.random.default_rng(seed)
    for _ in range(num_tokens):
        window = np.array([found[-length:]], np.int32)
        rows = np.pad(window, [(0, 0), (0, length - window.size)])  # of one length: compiled once
        batch = {"tokens": rows, "last": np.array([window.size - 1], np.int32)}
        (logits,) = run.predict([batch], _logits_of_next)
        if vocab_size is not None and vocab_size > len(logits):
            raise ConfigError(
                f"The tokenizer has {vocab_size:,} tokens, but the model {len(logits):,}. Give the "
                "tokenizer of the run's data."
            )
        logits = logits[:vocab_size].astype(np.float64)
        # The largest of logits with Gumbel noise is distributed as their softmax.
        noise = rng.gumbel(size=len(logits))
        found.append(int((logits / temperature + noise if temperature else logits).argmax()))
    return found


def _logits_of_next(model: Model, batch: Batch) -> Float[Array, "b vocab"]:
    """The logits of the token after the last of each row."""
    logits = call_model(model, batch["tokens"], train=False)
    if logits.ndim != 3:
        raise ConfigError(f"The model returns logits of shape {logits.shape}, not (b, t, vocab).")
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0]
