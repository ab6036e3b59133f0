"""Continues a text with the language model of a saved run.

run = jddp.open_run("runs/gpt_stdlib", mesh=1)
print(continue_text(run, "def ", num_tokens=200, temperature=0.8))
"""

from pathlib import Path
from typing import Any

from jddp.config.schema import Config
from jddp.errors import ConfigError, UsageError
from jddp.job.parts import find_source
from jddp.trainer.run import Run
from jddp.workbench.sampling import sample
from jddp.workbench.tokenize import BYTES, tokenizer_in, tokens_of


def continue_text(run: Run, prompt: str, *, tokenizer: Path | None = None, **sampling: Any) -> str:
    """Returns a prompt and its continuation by the model of a run with a config.

    Args:
      run: The run, such as `jddp.open_run(run_dir, mesh=1)`.
      prompt: Text to continue, of one token or more.
      tokenizer: A Hugging Face tokenizer file, for a run on tokens that are not bytes.
      **sampling: Number of tokens, temperature and seed, as in `sample`.

    Raises:
      UsageError: If the run's data is not text, or an argument breaks its rule.
      ConfigError: If a tokenizer is missing, cannot be read, does not know a character of the
        prompt, or does not fit the model.
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
    tokens = sample(run, tokens_of(prompt, coder), length=length, vocab_size=size, **sampling)
    return coder.decode(tokens)
