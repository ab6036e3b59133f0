"""Continues a text with the language model of a saved run.

    print(continue_text("runs/gpt_stdlib", "def ", num_tokens=200, temperature=0.8))
    tokens = sample(run, [100, 101, 102], 200, length=128)     # any run whose model scores tokens

Plain and exact: for each token the model sees the whole window again, as long as the sequences that
it was trained on, and nothing is kept from one token to the next.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jddp.config.schema import Config
from jddp.data.sources.tokenize import BYTES, Tokenizer, tokenizer_in
from jddp.errors import ConfigError, UsageError
from jddp.job.opened import open_run
from jddp.job.parts import find_source
from jddp.trainer.run import Run
from jddp.typing import Batch
from jddp.zoo.losses import call_model


def continue_text(
    run_dir: str | Path,
    prompt: str,
    *,
    tokenizer: Path | None = None,
    num_tokens: int = 100,
    temperature: float = 1.0,
    seed: int = 0,
    **chosen: Any,
) -> str:
    """Returns a prompt and its continuation by the model of a run.

    Args:
      run_dir: A run directory, or its URL.
      prompt: Text to continue, of one token or more.
      tokenizer: A file of Hugging Face's tokenizers, for a run on tokens that are not bytes.
      num_tokens: Number of tokens to add.
      temperature: Divisor of the logits; 0 takes the most likely token.
      seed: Seed of the random choices.
      **chosen: Further arguments of `open_run`.

    Raises:
      UsageError: If the data of the run were no text, or an argument breaks its rule.
      ConfigError: If a tokenizer is needed, cannot be read, or is not that of the model.
    """
    run = open_run(run_dir, mesh=1, **chosen)
    data = (run.config or {"data": {"name": None}})["data"]
    source = find_source(Config(**run.config)) if run.config and data["name"] else None
    if source is None or "tokens" not in source.spec:
        raise UsageError(
            f"--prompt: the data of {run_dir} are no tokens that jddp knows (data.name). Give "
            "--data; or call jddp.job.sampling.sample with tokens of your own."
        )
    coder = _tokenizer(tokenizer, source.sizes.get("vocab_size"))
    ((num_inputs, *_), _) = source.spec["tokens"]
    tokens = sample(
        run,
        coder.encode(prompt),
        num_tokens,
        length=num_inputs - 1,
        temperature=temperature,
        seed=seed,
        vocab_size=coder.vocab_size,
    )
    return coder.decode(tokens)


def sample(
    run: Run,
    tokens: Sequence[int] | np.ndarray,
    num_tokens: int,
    *,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[int]:
    """Returns tokens and their continuation by the model of a run.

    Args:
      run: A run of which the model returns logits `(b, t, vocab)` for "tokens" `(b, t)`, each
        position from those before it.
      tokens: One token or more.
      num_tokens: Number of tokens to add.
      length: Longest sequence that the model sees; of more tokens the last are seen.
      temperature: Divisor of the logits; 0 takes the most likely token.
      seed: Seed of the random choices.
      vocab_size: Number of tokens to choose from; by default those of the model.

    Raises:
      UsageError: If an argument breaks its rule.
      ConfigError: If the model returns no such logits.
    """
    found = [int(token) for token in tokens]
    if not found or num_tokens < 1 or not 0 <= temperature < np.inf:
        raise UsageError(
            f"{len(found)} tokens of a prompt, {num_tokens} to add, temperature {temperature}: "
            "a prompt has a token or more, one or more are added, and the temperature is 0 or more."
        )
    rng = np.random.default_rng(seed)
    for _ in range(num_tokens):
        window = found[-length:]
        row = np.zeros((1, length), np.int32)  # what follows the window is not seen
        row[0, : len(window)] = window
        batch = {"tokens": row, "last": np.array([len(window) - 1], np.int32)}
        (logits,) = run.predict([batch], _logits_of_next)
        if vocab_size is not None and vocab_size > len(logits):
            raise ConfigError(
                f"The tokenizer has {vocab_size:,} tokens, and the model {len(logits):,}. Give the "
                "tokenizer of its data."
            )
        found.append(_choose(logits[:vocab_size].astype(np.float64), temperature, rng))
    return found


def _logits_of_next(model: Any, batch: Batch) -> Float[Array, "b vocab"]:
    """The logits of the token after the last of each row."""
    logits = call_model(model, batch["tokens"], train=False)
    if logits.ndim != 3:
        raise ConfigError(f"The model gives {logits.shape} for tokens. It needs (b, t, vocab).")
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0]


def _choose(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """A token with the probability that its logit has; the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    # The largest of logits with Gumbel noise is distributed as their softmax.
    return int((logits / temperature + rng.gumbel(size=len(logits))).argmax())


def _tokenizer(file: Path | None, vocab_size: int | None) -> Tokenizer:
    if file is not None:
        return tokenizer_in(file)
    if vocab_size != BYTES.vocab_size:
        raise ConfigError("--prompt: the tokens of the run are no bytes. Give --tokenizer FILE.")
    return BYTES
