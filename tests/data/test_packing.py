"""Packing of documents: every item in one row, whole documents, each token predicted once."""

import numpy as np
import pytest

from jddp.data import make_source
from jddp.data.packing import pack_items
from jddp.data.source import spec_of
from jddp.data.sources.tokens import PackedExamples
from jddp.ground.errors import ConfigError, DataError


def best_fit_decreasing(lengths, capacity):
    """The number of rows, item by item, as in a textbook."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        if fitting := [room for room in rooms if room >= length]:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_items_fit_into_as_few_rows_as_by_best_fit_decreasing(capacity):
    rng = np.random.default_rng(capacity)
    for num_items in (0, 1, 2, 30, 300):
        lengths = rng.integers(1, capacity + 1, num_items)
        rows = pack_items(lengths, capacity)
        filled = np.bincount(rows, weights=lengths)
        assert len(filled) == best_fit_decreasing(lengths, capacity)
        assert (filled > 0).all()
        assert not num_items or filled.max() <= capacity


def test_rows_are_in_the_order_of_their_first_items():
    assert pack_items(np.array([2, 5, 3, 4, 1]), 5).tolist() == [0, 1, 0, 2, 2]


SHARDS = np.arange(0, 60, dtype=np.uint16), np.arange(100, 123), np.arange(200, 201)
DOCUMENTS = [np.array([0, 3, 4, 30, 30]), np.array([0, 5, 12]), np.array([0])]


def all_of(examples):
    return examples.take(np.arange(len(examples)))


@pytest.mark.parametrize("length", [1, 2, 7, 11, 64])
def test_each_token_of_a_document_but_its_first_is_predicted_once(length):
    examples = PackedExamples(*SHARDS, documents=DOCUMENTS, sequence_length=length)
    rows = all_of(examples)
    targets = rows["tokens"][:, 1:][rows["mask"] == 1]
    firsts = [shard[begins] for shard, begins in zip(SHARDS, DOCUMENTS, strict=True)]
    assert sorted(targets) == sorted({*np.concatenate(SHARDS)} - {*np.concatenate(firsts)})
    inputs = rows["tokens"][:, :-1][rows["mask"] == 1]
    np.testing.assert_array_equal(inputs, targets - 1)  # the token before it
    backwards = np.arange(len(examples))[::-1]
    for name, array in examples.take(backwards).items():
        np.testing.assert_array_equal(array, rows[name][::-1])
    assert all(not len(array) for array in examples.take(backwards[:0]).values())


def test_segments_number_the_documents_of_a_row_and_padding_is_zero():
    documents = [np.array([0, 4, 6, 9])]
    rows = all_of(PackedExamples(np.arange(12), documents=documents, sequence_length=7))
    assert rows["tokens"].tolist() == [[0, 1, 2, 3, 6, 7, 8, 0], [4, 5, 9, 10, 11, 0, 0, 0]]
    assert rows["segments"].tolist() == [[1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0, 0]]
    assert rows["mask"].tolist() == [[1, 1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("begins", [[1, 5], [0, 9, 5], [0, 61], []])
def test_positions_that_are_of_other_tokens_are_refused(begins):
    with pytest.raises(DataError, match="do not rise from 0 to 60, the number of tokens"):
        PackedExamples(SHARDS[0], documents=[np.array(begins, int)], sequence_length=4)


def test_documents_of_one_token_are_too_short():
    with pytest.raises(DataError, match="no document has two tokens"):
        PackedExamples(np.arange(3), documents=[np.arange(3)], sequence_length=4)


def test_padding_of_the_standard_library_is_below_one_token_in_fifty():
    source = make_source("python_stdlib", kwargs={"sequence_length": 1024, "documents": "pack"})
    data = source.load()
    assert data.train.padding < 0.02
    assert data.test.padding < 0.02
    assert spec_of(data.train) == source.spec


def test_another_word_for_documents_is_refused():
    with pytest.raises(ConfigError, match="'wrap' is none of cross, mask, pack"):
        make_source("python_stdlib", kwargs={"documents": "wrap"})
