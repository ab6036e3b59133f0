"""The direction in which a metric improves, by a table of common names.

    direction_of("val_accuracy")    # "max"
    direction_of("top5_error")      # "min"
    direction_of("score")           # None: its user has to say

The last word of a name decides: `macro_f1`, `accuracy@5`. A name is unknown if this word is not in
the table, or another word negates it or makes it a spread, a number or a change (`std_accuracy`): a
wrong guess would keep the worst state as the best one.
"""

import difflib
import re

from jddp.errors import ConfigError, check_choice

MODES = ("auto", "max", "min")
_WORDS = {
    "max": "acc accuracy auc auroc bleu f1 iou precision r2 recall reward",
    "min": "byte error loss mae mse nll perplexity ppl rmse wer",  # bits_per_byte
}
DIRECTIONS = {word: mode for mode, words in _WORDS.items() for word in words.split()}
_OTHER = {"delta", "minus", "neg", "negative", "num", "std", "var"}  # neg_mean_squared_error


def direction_of(metric: str) -> str | None:
    """Returns "max" or "min", the better direction of a metric; None where its name has neither.

    Args:
      metric: Name of the metric.
    """
    words = re.findall("[a-z][a-z0-9]*", metric.lower())
    if not words or not _OTHER.isdisjoint(words):
        return None
    last = words[-1]
    return DIRECTIONS.get(last) or DIRECTIONS.get(last.rstrip("0123456789"))


def choose_mode(metric: str, mode: str, *, key: str) -> str:
    """Returns "max" or "min": the mode, or under "auto" the direction of the metric.

    Args:
      metric: Name of the metric.
      mode: One of `MODES`.
      key: Name of the argument or key that sets the mode, for an error.

    Raises:
      ConfigError: If the mode is unknown, or is "auto" and the name of the metric has no direction.
    """
    check_choice(key, mode, MODES)
    chosen = direction_of(metric) if mode == "auto" else mode
    if chosen is None:
        near = difflib.get_close_matches(metric.lower(), sorted(DIRECTIONS), n=1, cutoff=0.8)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key} 'auto': the name {metric!r} does not show whether larger or smaller is better."
            f"{meant} Set {key} to 'max' or 'min'."
        )
    return chosen
