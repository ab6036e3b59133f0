"""The direction in which a metric improves, read from the words of its name.

    direction_of("val_accuracy")    # "max"
    direction_of("top5_error")      # "min"
    direction_of("score")           # None: its user has to say

A name is split into words at marks such as `_` and `@`, or at capitals, and a known word counts
wherever it stands: `macro_f1`, `accuracy@5`, `testAUC`. A name is unknown if it has no known word,
words of both directions, or one for a spread, a number or a change (`accuracy_std`): a wrong guess
would keep the worst state as the best one.
"""

import difflib
import re
from itertools import pairwise

from jddp.errors import ConfigError, check_choice

MODES = ("auto", "max", "min")
# Words, and pairs of words joined by "_".
_RISES = """
    acc accuracy accuracies ap auc aucpr auprc auroc bleu chrf cider correct correlation dice elbo
    f1 f2 fbeta hit hits iou jaccard kappa likelihood map mcc meteor miou mrr ndcg pearson precision
    prauc psnr r2 r_squared recall return returns reward rewards roc rocauc rouge sdr sensitivity
    snr spearman specificity ssim success tnr tpr true_negative true_negatives true_positive
    true_positives win winrate wins
"""
_FALLS = """
    bce bits_per bpb bpc bpd brier cer cost crossentropy cross_entropy crps deviance distance
    divergence ece eer err error errors false_negative false_negatives false_positive
    false_positives fdr fid fnr fpr gap kid kl logloss loss losses lpips mae mape miss mistakes mse
    msle nll penalty perplexity ppl regret residual rmse rmsle smape ter wer xent
"""
_NEITHER = """
    change count decrease delta drop improvement increase num number ratio reduction scale std
    stddev stderr threshold var variance weight weights
"""
RISES, FALLS, NEITHER = (frozenset(text.split()) for text in (_RISES, _FALLS, _NEITHER))
NEGATED = ("neg", "negative", "minus")  # as the first word: neg_mean_squared_error


def direction_of(metric: str) -> str | None:
    """Returns "max" or "min", the better direction of a metric; None where its name has neither.

    Args:
      metric: Name of the metric.
    """
    split_at_capitals = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", metric)
    return _direction(metric.lower()) or _direction(split_at_capitals.lower())


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
        near = difflib.get_close_matches(metric.lower(), sorted(RISES | FALLS), n=1, cutoff=0.8)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key} 'auto': the name {metric!r} does not show whether larger or smaller is better."
            f"{meant} Set {key} to 'max' or 'min'."
        )
    return chosen


def _direction(name: str) -> str | None:
    words = [word for found in re.findall("[a-z0-9]+", name) if (word := _without_size(found))]
    is_negated = words[:1] in [[word] for word in NEGATED]
    known = {*words, *map("_".join, pairwise(words))}
    # The last word is the kind of the metric: an `iou_loss` falls, and so does a `precision_error`.
    is_loss = not FALLS.isdisjoint(words[-1:])
    rises = not RISES.isdisjoint(known) and not is_loss
    falls = not FALLS.isdisjoint(known)
    if rises == falls or not NEITHER.isdisjoint(words):
        return None
    return "max" if rises != is_negated else "min"


def _without_size(word: str) -> str:
    """A word without the digits of a size, as of `bleu4`; a known one, such as `f1`, as it is."""
    return word if word in RISES else word.strip("0123456789")
