"""Continues sequences of tokens with the language model of a run.

    tokens = sample(run, [100, 101, 102], 200, length=128)     # any run whose model scores tokens
    both = sample_each(run, [[100], [101, 102]], 200, length=128)

It is simple and exact: for each token the model reads the whole window again, which is as long as a
training sequence. Nothing is cached between tokens. The state of the run is read and not changed,
and the random numbers are drawn on the host.

`SampleText` is a callback of a run that does it at each evaluation, `continue_text` does it for
`jddp predict --prompt`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jddp.config.schema import Config
from jddp.engine.state import by_path
from jddp.ground.errors import ConfigError, UsageError
from jddp.modules.base import ArrayBatch, Model, call_model
from jddp.trainer.job.parts import find_source
from jddp.trainer.run import Callback, Run, check_counts
from jddp.workbench.tokenize import BYTES, tokenizer_in

Tokens = Sequence[int] | np.ndarray


def sample(run: Run, tokens: Tokens, num_tokens: int = 100, **options: Any) -> list[int]:
    """Returns tokens and their continuation by the model of a run.

    Args:
      run: A run whose model returns logits `(b, t, vocab)` for "tokens" `(b, t)`, each position
        computed from earlier ones.
      tokens: One token or more.
      num_tokens: Number of tokens to add.
      **options: The length of sequences, and other options of `sample_each`.

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
    """Continues each of several sequences as if it were sampled alone.

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
    """Refuses arguments that allow no sampling.

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


def _logits_of_next(model: Model, batch: ArrayBatch) -> Float[Array, "b vocab"]:
    """The logits of the token after the last of each row."""
    logits = call_model(model, batch["tokens"], train=False)
    if logits.ndim != 3:
        raise ConfigError(f"The model returns logits of shape {logits.shape}, not (b, t, vocab).")
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0]


MOST_CHARACTERS = 150  # Maximum number of characters of a line in the terminal.


class SampleText(Callback):
    """Continues one text or several at each evaluation, with the parameters that it evaluates.

    The texts go to the sinks and the metrics file ("sample", or "sample/1" and so on), to the page
    of the run and, shortened, to the terminal. With the same parameters and arguments they are the
    same, and equal the texts of `jddp predict RUN --prompt`. Each token costs one prediction of a
    row on each device.

    Args:
      prompt: Text to continue, or several.
      num_tokens: Number of tokens to add, at most `length`.
      temperature: Divisor of the logits; 0 takes the most likely token.
      seed: Seed of the random choices.
      tokenizer: "bytes", or a Hugging Face tokenizer file; by default bytes, if the model has 256
        outputs.
      length: Number of tokens that the model sees; by default as many as it predicts in an example
        of the evaluation.

    Raises:
      UsageError: If a prompt has no token, or a number breaks its rule.
      ConfigError: If the tokenizer cannot be read.
    """

    def __init__(
        self,
        prompt: str | Sequence[str],
        *,
        num_tokens: int = 100,
        temperature: float = 1.0,
        seed: int = 0,
        tokenizer: str | Path | None = None,
        length: int | None = None,
    ) -> None:
        check_counts(num_tokens=num_tokens, length=length)
        self._coder = BYTES if tokenizer in (None, "bytes") else tokenizer_in(Path(str(tokenizer)))
        prompts = [prompt] if isinstance(prompt, str) else prompt
        self._prompts = [self._coder.encode(text) for text in prompts]
        for tokens in self._prompts:
            check_sampling(len(tokens), num_tokens, temperature, seed)
        self._num_tokens, self._length = num_tokens, length
        self._temperature, self._seed = temperature, seed
        self._must_be_bytes = tokenizer is None

    def on_begin(self, run: Run) -> None:
        """Scores one token, so that an error of the first evaluation comes now."""
        self._length = self._length or _length_of(run)
        if self._num_tokens > self._length:
            raise ConfigError(
                f"sample_text: num_tokens is {self._num_tokens}, and the model sees {self._length} "
                f"tokens. Give at most {self._length}."
            )
        size = next_logits(run, self._prompts, length=self._length).shape[1]
        if self._must_be_bytes and size != BYTES.vocab_size:
            raise ConfigError(
                f"sample_text: the model scores {size:,} tokens, and bytes are {BYTES.vocab_size}. "
                "Give tokenizer=, the file of the tokenizer of its data; or tokenizer='bytes'."
            )
        check_vocabulary(self._coder.vocab_size, size)

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Continues the texts; every process takes part, and process 0 writes."""
        assert self._length is not None, "a run begins before it is evaluated"
        found = sample_each(
            run,
            self._prompts,
            self._num_tokens,
            length=self._length,
            temperature=self._temperature,
            seed=self._seed,
            vocab_size=self._coder.vocab_size,
        )
        texts = [self._coder.decode(tokens) for tokens in found]
        names = ["sample"] if len(texts) == 1 else [f"sample/{i}" for i in range(1, len(texts) + 1)]
        run.log(dict(zip(names, texts, strict=True)))
        for text in texts:
            run.note(f"sample {run.step}  {_in_one_line(text)}")


def _length_of(run: Run) -> int:
    """Number of tokens that are predicted in an example of the evaluation."""
    batches = run.test_batches
    if iter(batches) is batches:
        raise ConfigError(
            "sample_text: evaluate= is an iterator, which can be read only once. Give length=."
        )
    rows = by_path(next(iter(batches), {}))
    if "tokens" not in rows:
        raise ConfigError(
            f"sample_text continues tokens, and the evaluation has {', '.join(rows) or 'no rows'}. "
            "Leave the callback out; or give length=, the number of tokens that the model sees."
        )
    return int(rows["tokens"].shape[1]) - 1


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}..."


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
            "Use --data; or call jddp.workbench.sampling.sample with your own tokens."
        )
    coder = BYTES if tokenizer is None else tokenizer_in(tokenizer)
    if tokenizer is None and source.sizes.get("vocab_size") != BYTES.vocab_size:
        raise ConfigError("--prompt: the run's tokens are not bytes. Give --tokenizer FILE.")
    length, size = source.spec["tokens"][0][0] - 1, coder.vocab_size
    tokens = sample(run, coder.encode(prompt), length=length, vocab_size=size, **sampling)
    return coder.decode(tokens)
