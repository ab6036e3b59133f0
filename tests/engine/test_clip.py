"""Clipping scales a gradient down to a global norm, however its parts are spread."""

import numpy as np
from two_replicas import AXIS, on_two

from jddp.engine.view import Clip, View, view_of_shards


def clipped(clip, view, **grads):
    return on_two(lambda grads: clip(grads, view), grads)


def test_without_clipping_gradients_stay_and_there_is_no_metric():
    grads, metrics = clipped(Clip(None), View(AXIS), w=np.float32([[3, 4]] * 2))
    assert (grads["w"].tolist(), metrics) == ([[3, 4]] * 2, {})


def test_a_longer_gradient_is_scaled_to_the_limit_and_its_norm_before_is_reported():
    both = {"w": np.float32([3, 3]), "v": np.float32([4, 4])}
    grads, metrics = clipped(Clip(2.5), View(AXIS), **both)
    assert (grads["w"].tolist(), grads["v"].tolist()) == ([1.5] * 2, [2.0] * 2)
    assert metrics["grad_norm"].tolist() == [5, 5]


def test_a_shorter_gradient_is_left_as_it_is():
    grads, metrics = clipped(Clip(6.0), View(AXIS), w=np.float32([[3, 4]] * 2))
    assert (grads["w"].tolist(), metrics["grad_norm"].tolist()) == ([[3, 4]] * 2, [5, 5])


def test_replicas_with_shards_clip_by_the_norm_of_all_shards():
    grads, metrics = clipped(Clip(2.5), view_of_shards(AXIS), w=np.float32([3, 4]))
    assert (grads["w"].tolist(), metrics["grad_norm"].tolist()) == ([1.5, 2], [5, 5])


def test_replicas_with_gradients_of_their_own_clip_by_their_own_norms_and_report_the_mean():
    grads, metrics = clipped(Clip(2.0), View(AXIS, is_mean=False), w=np.float32([1, 8]))
    assert (grads["w"].tolist(), metrics["grad_norm"].tolist()) == ([1, 2], [4.5, 4.5])


def test_squares_that_float16_does_not_hold_are_added_in_float32():
    grads, metrics = clipped(Clip(640.0), View(AXIS), w=np.float16([1280] * 2))
    assert (grads["w"].tolist(), grads["w"].dtype) == ([640] * 2, np.float16)
    assert metrics["grad_norm"].tolist() == [1280] * 2
