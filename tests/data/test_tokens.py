"""Tokens: windows and packed rows, in which each token is predicted once."""

import numpy as np
import pytest
from data_files import rows_of

from jddp.data import make_source
from jddp.data.packing import pack_items
from jddp.data.source import spec_of
from jddp.data.sources.tokens import PackedExamples, TokenExamples, source_files
from jddp.ground.errors import DataError


def test_standard_library_text_is_cut_into_windows_without_tests_and_what_was_installed(tmp_path):
    data = make_source("python_stdlib", kwargs={"sequence_length": 64}).load()
    assert data.sha256[:12] in data.description
    assert 0.05 < len(data.test) / len(data.train) < 0.2
    window = data.train.take(np.array([0, 1]))["tokens"]
    assert window.shape == (2, 65)
    assert window[0, -1] == window[1, 0]
    assert window.max() < 256
    for name in ("a.py", "b/c.py", "b/test/d.py", "site-packages/e.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.as_posix() for path in source_files(tmp_path)] == ["a.py", "b/c.py"]


def test_padding_of_the_standard_library_is_below_one_token_in_fifty():
    source = make_source("python_stdlib", kwargs={"sequence_length": 1024, "documents": "pack"})
    data = source.load()
    assert max(data.train.padding, data.test.padding) < 0.02
    assert spec_of(data.train) == source.spec


SHARD = np.arange(21, dtype=np.uint16)


def tokens_in(folder, train, **kwargs):
    np.save(folder / "train.npy", train)
    np.save(folder / "test.npy", np.arange(9, dtype=np.uint32))
    kwargs = {"sequence_length": 4, "vocab_size": 21} | kwargs
    source = make_source("tokens", directory=str(folder), kwargs=kwargs)
    data = source.load()
    assert spec_of(data.train) == spec_of(data.test) == source.spec
    return rows_of(data.train)["tokens"], rows_of(data.test)["tokens"]


def test_a_directory_of_tokens_yields_windows(tmp_path):
    train, test = tokens_in(tmp_path, SHARD)
    assert (len(train), len(test)) == (5, 2)
    assert train[4].tolist() == [16, 17, 18, 19, 20]


@pytest.mark.parametrize(
    ("train", "kwargs", "message"),
    [
        (SHARD, {"sequence_length": 21}, "21 tokens are too few"),
        (SHARD, {"vocab_size": 20}, "token 20 at 20 is not in 0 ... 19"),
        (SHARD.astype(int) - 3, {}, "token -3 at 0"),
        (SHARD.astype(int) + 2**31, {"vocab_size": None}, "token 2147483648 at 0"),
        (np.zeros((3, 3), np.uint16), {}, r"tokens are uint16\(3, 3\)"),
    ],
)
def test_tokens_that_cannot_be_read_are_refused_by_file_and_place(tmp_path, train, kwargs, message):
    with pytest.raises(DataError, match=rf"train\.npy: {message}"):
        tokens_in(tmp_path, train, **kwargs)


def test_windows_predict_each_token_of_each_shard_once():
    shards = np.arange(11, dtype=np.uint16), np.arange(100, 103), np.arange(200, 209)
    rows = rows_of(TokenExamples(*shards, sequence_length=4))
    assert rows["tokens"].tolist() == [[*range(i, i + 5)] for i in (0, 4, 200, 204)]


def best_fit_decreasing(lengths, capacity):
    """The number of rows, item by item, as in a textbook."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        room = min((x for x in rooms if x >= length), default=None)
        if room is not None:
            rooms.remove(room)
        rooms.append((capacity if room is None else room) - length)
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
    # Rows are in the order of their first items.
    assert pack_items(np.array([2, 5, 3, 4, 1]), 5).tolist() == [0, 1, 0, 2, 2]


SHARDS = np.arange(0, 60, dtype=np.uint16), np.arange(100, 123), np.arange(200, 201)
DOCUMENTS = [np.array([0, 3, 4, 30, 30]), np.array([0, 5, 12]), np.array([0])]


@pytest.mark.parametrize("length", [1, 2, 7, 11, 64])
def test_each_token_of_a_packed_document_but_its_first_is_predicted_once(length):
    examples = PackedExamples(*SHARDS, documents=DOCUMENTS, sequence_length=length)
    rows = rows_of(examples)
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
    rows = rows_of(PackedExamples(np.arange(12), documents=documents, sequence_length=7))
    assert rows["tokens"].tolist() == [[0, 1, 2, 3, 6, 7, 8, 0], [4, 5, 9, 10, 11, 0, 0, 0]]
    assert rows["segments"].tolist() == [[1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0, 0]]
    assert rows["mask"].tolist() == [[1, 1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("begins", [[1, 5], [0, 9, 5], [0, 61], [], [*range(60)]])
def test_documents_of_other_tokens_or_of_one_token_each_are_refused(begins):
    with pytest.raises(DataError, match="do not rise from 0 to 60|no document has two tokens"):
        PackedExamples(SHARDS[0], documents=[np.array(begins, int)], sequence_length=4)
