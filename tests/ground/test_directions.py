"""Directions of metrics: known by the last word of a name, or left to the user."""

import pytest

from jddp.ground.errors import ConfigError
from jddp.ground.names import choose_mode, direction_of

RISING = """
    accuracy val_accuracy top5_accuracy test/accuracy accuracy@5 acc1 balanced_accuracy Accuracy
    macro_f1 F1 auc roc_auc AUROC precision recall@10 recall5 bleu BLEU4 mean_iou r2 R2 val/r2
    episode_reward
"""
FALLING = """
    loss val_loss error top1_error accuracy_error perplexity ppl mse RMSE mean_squared_error
    iou_loss nll wer bits_per_byte
"""
UNKNOWN = """
    score entropy step_time accuracy_std std_accuracy num_errors loss_scale loss_ratio fpr_at_tpr95
    neg_mean_squared_error neg_log_loss minus_loss negative_log_likelihood delta_loss var_loss
    error_reduction accuracy_drop lossless relapse mapping loss_class_3 f2 5 "" @
"""


@pytest.mark.parametrize(
    "names, direction", [(RISING, "max"), (FALLING, "min"), (UNKNOWN, None)], ids=str
)
def test_a_direction_is_known_by_the_last_word_of_a_name(names, direction):
    found = {name: direction_of(name) for name in names.split()}
    assert found == dict.fromkeys(found, direction)


def test_the_mode_is_as_given_or_that_of_the_name_or_asked_for():
    assert choose_mode("accuracy", "auto", key="mode") == "max"
    assert choose_mode("accuracy", "min", key="mode") == "min"
    for metric, mode in (("score", "auto"), ("accuracy", "most")):
        with pytest.raises(ConfigError, match="best_mode"):
            choose_mode(metric, mode, key="best_mode")
