"""A callback that continues texts at each evaluation, so that one can read what a model learns.

callbacks: [{name: sample_text, kwargs: {prompt: "def ", temperature: 0.8}}]       # of a config
jddp.fit(..., callbacks=[SampleText("def ", temperature=0.8)])

It reads the state of the run and changes nothing of it: the steps are those of a run without it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jddp.engine.state import by_path
from jddp.errors import ConfigError
from jddp.trainer.callbacks import Callback
from jddp.trainer.options import check_counts
from jddp.trainer.run import Run
from jddp.workbench.sampling import check_sampling, check_vocabulary, next_logits, sample_each
from jddp.workbench.tokenize import BYTES, tokenizer_in, tokens_of

MOST_CHARACTERS = 150  # of a line in the terminal


class SampleText(Callback):
    """Continues one text or several at each evaluation, with the parameters that it evaluates.

    The texts go to the sinks and the metrics file ("sample", or "sample/1" and so on), to the page
    of the run and, shortened, to the terminal. With the same parameters and arguments they are the
    same, and those of `jddp predict RUN --prompt`. Each token costs one prediction of a row on each
    device.

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
      ConfigError: If the tokenizer cannot be read, or does not know a character of a prompt.
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
        self._prompts = [tokens_of(text, self._coder) for text in prompts]
        for tokens in self._prompts:
            check_sampling(len(tokens), num_tokens, temperature, seed)
        self._num_tokens, self._length = num_tokens, length
        self._temperature, self._seed = temperature, seed
        self._must_be_bytes = tokenizer is None

    def on_begin(self, run: Run) -> None:
        """Scores one token, so that what fails at the first evaluation fails now."""
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
