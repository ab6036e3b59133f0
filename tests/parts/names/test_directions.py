"""Directions of metrics: known by the words of their names, or left to the user."""

import pytest

from jddp.errors import ConfigError
from jddp.names.directions import FALLS, NEITHER, RISES, choose_mode, direction_of

RISING = """
    accuracy val_accuracy top5_accuracy test/accuracy accuracy@5 accuracy_class_3 ValAccuracy acc1
    macro_f1 f1_score f1-macro auc roc_auc testAUC AUROC precision recall@10 recall5 bleu BLEU4
    mIoU mean_iou psnr r2 R2 r_squared hits hits@10 hit_rate reward episode_reward mean_return
    mAP map50 ndcg@10 neg_mean_squared_error neg_log_loss true_positive_rate log_likelihood
"""
FALLING = """
    loss val_loss lossTotal loss_class_3 error top1_error error_rate accuracy_error perplexity ppl
    cross_entropy mse RMSE mean_squared_error iou_loss nll negative_log_likelihood bits_per_byte
    false_positive_rate wer kl_divergence
"""
UNKNOWN = """
    score entropy step_time accuracy_std num_errors loss_scale loss_ratio fpr_at_tpr95
    error_reduction accuracy_drop lossless relapse mapping 5 "" @
"""


@pytest.mark.parametrize(
    "names, direction", [(RISING, "max"), (FALLING, "min"), (UNKNOWN, None)], ids=str
)
def test_a_direction_is_known_by_the_words_of_a_name(names, direction):
    found = {name: direction_of(name) for name in names.split()}
    assert found == dict.fromkeys(found, direction)


def test_no_word_has_two_directions():
    assert not RISES & FALLS
    assert not NEITHER & (RISES | FALLS)


def test_the_mode_is_as_given_or_that_of_the_name_or_asked_for():
    assert choose_mode("accuracy", "auto", key="mode") == "max"
    assert choose_mode("accuracy", "min", key="mode") == "min"
    assert choose_mode("score", "max", key="mode") == "max"
    with pytest.raises(ConfigError, match="better. Did you mean 'accuracy'. Set mode to 'max'"):
        choose_mode("acuracy", "auto", key="mode")
    with pytest.raises(
        ConfigError, match="best_mode 'auto': .*'score'.* better. Set best_mode to 'max' or"
    ):
        choose_mode("score", "auto", key="best_mode")
    with pytest.raises(ConfigError, match="mode 'most' is unknown. Choose one of 'auto', 'max'"):
        choose_mode("accuracy", "most", key="mode")
