"""Tokens: windows and packed rows, in which each token is predicted once."""

import functools

import jax
import numpy as np
import optax
import pytest
from data_files import rows_of
from flax import linen as nn
from sweeps import swept

import jddp
from jddp.commands.summary import opening
from jddp.config.schema import Config
from jddp.data import make_source
from jddp.data.packing import pack_items
from jddp.data.source import spec_of
from jddp.data.sources.tokens import PackedExamples, TokenExamples, source_files
from jddp.ground.errors import ConfigError, DataError
from jddp.trainer.job.build import build, train
from jddp.workbench.tokenize import BYTES, write_tokens
from jddp.zoo.losses import next_token
from jddp.zoo.models.transformer import GPT


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
    return make_source("tokens", directory=str(folder), kwargs=kwargs)


def test_tokens_that_cannot_be_read_are_refused_by_file_and_place(tmp_path):
    for shard, kwargs, message in (
        (SHARD, {"sequence_length": 21}, "21 tokens are too few"),
        (SHARD, {"vocab_size": 20}, "token 20 at 20 is not in 0 ... 19"),
        (SHARD.astype(int) - 3, {}, "token -3 at 0"),
        (SHARD.astype(int) + 2**31, {"vocab_size": None}, "token 2147483648 at 0"),
        (np.zeros((3, 3), np.uint16), {}, r"tokens are uint16\(3, 3\)"),
    ):
        with pytest.raises(DataError, match=rf"train\.npy: {message}"):
            tokens_in(tmp_path, shard, **kwargs).load()


def test_windows_predict_each_token_of_each_shard_once(tmp_path):
    source = tokens_in(tmp_path, SHARD)
    data = source.load()
    assert spec_of(data.train) == spec_of(data.test) == source.spec
    assert (len(data.train), len(data.test)) == (5, 2)
    shards = np.arange(11, dtype=np.uint16), np.arange(100, 103), np.arange(200, 209)
    rows = rows_of(TokenExamples(*shards, sequence_length=4))
    assert rows["tokens"].tolist() == [[*range(i, i + 5)] for i in (0, 4, 200, 204)]


def best_fit_decreasing(lengths, capacity):
    """The number of rows, item by item, as in a textbook."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        if room := min((x for x in rooms if x >= length), default=0):
            rooms.remove(room)
        rooms.append((room or capacity) - length)
    return len(rooms)


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_items_fit_into_as_few_rows_as_by_best_fit_decreasing(capacity):
    rng = np.random.default_rng(capacity)
    for num_items in (0, 1, 2, 30, 300):
        lengths = rng.integers(1, capacity + 1, num_items)
        filled = np.bincount(pack_items(lengths, capacity), weights=lengths)
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


pytestmark = pytest.mark.usefixtures("started_devices")

make = functools.partial(GPT, vocab_size=32, num_layers=2, num_heads=2, width=16, max_length=12)
FORMS = {"plain": {}, "scan": {"scan_layers": True}}
FORMS["remat"] = {"remat": True, "embedding_gradient": "one_hot"}
LENGTHS = [5, 3, 4]


def row_of(*documents):
    """The documents in a row: tokens, and segments."""
    tokens, segments = np.zeros((2, 1, 12), np.int32)
    tokens[0, : sum(map(len, documents))] = np.concatenate(documents)
    numbers = np.repeat(np.arange(len(documents)) + 1, [*map(len, documents)])
    segments[0, : len(numbers)] = numbers
    return tokens, segments


def some_documents():
    return [np.random.default_rng(n).integers(0, 32, n, np.int32) for n in LENGTHS]


def made(**options):
    """A compiled model, with its first parameters: a function of tokens and segments."""
    model = make(**options)
    values = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    return functools.partial(jax.jit(model.apply), values)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_a_document_in_a_packed_row_has_the_logits_that_it_has_alone(options):
    apply = made(**options)
    documents = some_documents()
    tokens, segments = row_of(*documents)
    packed = apply(tokens, segments=segments)[0]
    for document, logits in zip(documents, np.split(packed, np.cumsum(LENGTHS))[:3], strict=True):
        # Sums over the keys of a row have another order than over those of a document.
        np.testing.assert_allclose(logits, apply(document[None])[0], atol=2e-6)
    one = apply(tokens, segments=np.ones_like(segments))
    np.testing.assert_allclose(one, apply(tokens), atol=2e-6)
    assert np.abs(packed[5:] - one[0][5:]).max() > 0.01  # which segments do change


def test_padding_and_other_documents_change_no_bit_of_a_document():
    apply = made()
    first, second, third = some_documents()
    for others in ((second[::-1], third), (second, third[::-1]), (second,)):
        rows = [row_of(first, *rest) for rest in ((second, third), others)]
        one, other = (apply(tokens, segments=segments)[0, :5] for tokens, segments in rows)
        np.testing.assert_array_equal(one, other)


def packed_batch():
    lengths = np.random.default_rng(0).integers(2, 20, 40)
    tokens = np.random.default_rng(1).integers(0, 32, lengths.sum())
    begins = np.cumsum(lengths) - lengths
    return PackedExamples(tokens, documents=[begins], sequence_length=12).take(np.arange(16))


@pytest.mark.parametrize("options", swept({"parts": {"accumulate_steps": 2}, "plain": {}}, every=2))
def test_steps_of_packed_rows_on_devices_equal_those_on_one(options):
    batch = packed_batch()
    assert 0 < batch["mask"].mean() < 1
    assert len({*batch["mask"].reshape(4, -1).sum(1)}) > 1  # so a mean of means would be another
    report = jddp.verify(make(), optax.sgd(0.1), next_token, batch, mesh=4, **options)
    assert report.passed, report


def test_a_model_without_segments_is_refused():
    batch = packed_batch()
    with pytest.raises(ConfigError, match="holds segments, .*documents=cross"):
        jddp.DataParallel(nn.Embed(32, 32), optax.sgd(0.1), next_token, mesh=2).init(0, batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in ("prose", "code"):
        texts = [f"{name[0] * 9}{i} " * (i % 4 + 2) for i in range(60)]
        write_tokens(texts, folder / name, tokenizer=BYTES)
    return folder


def config(folder, run, *, num_devices=2, num_steps=6, **data):
    weights = {"prose": 0.3, "code": 0.7}
    mixture = [{"dir": str(folder / name), "weight": weights[name]} for name in weights]
    kwargs = {"sequence_length": 15, "documents": "pack"}
    data = {"name": "tokens", "mixture": mixture, "global_batch_size": 8, "kwargs": kwargs} | data
    sizes = {"num_layers": 1, "num_heads": 2, "width": 8, "max_length": 16}
    return Config(
        data=data,
        model={"name": "gpt", "kwargs": sizes},
        loss={"name": "next_token"},
        train={"num_steps": num_steps},
        mesh={"num_devices": num_devices},
        optimizer={"schedule": {"kwargs": {"decay_steps": 6}}},
        run={"dir": run and str(run)},
    )


@pytest.mark.slow
def test_two_devices_train_a_mixture_as_one_does_resume_and_evaluate_all_examples(folder, tmp_path):
    one, two = (train(config(folder, tmp_path / str(n), num_devices=n)) for n in (1, 2))
    assert two.evaluate() == pytest.approx(one.evaluate(), rel=1e-4)
    train(config(folder, tmp_path / "parts", num_steps=4))
    assert train(config(folder, tmp_path / "parts")).evaluate() == two.evaluate()
    only = [["data.mixture=[]", f"data.dir={folder / name}"] for name in ("prose", "code")]
    own = [jddp.open_run(two.run_dir, overrides=keys) for keys in only]
    counts = [run.evaluate()["examples"] for run in own]
    assert two.evaluate()["examples"] == sum(counts)
    assert 0 not in counts


def test_the_first_lines_have_the_shares(folder):
    job = build(config(folder, None))
    assert "mixture, an epoch of 0.3 of" in opening(job, "x", "", columns=999)


def test_mistakes_in_a_mixture_are_one_line(folder):
    for data, said in (
        ({"shuffle": False}, "'mixture' and 'shuffle' cannot be combined"),
        ({"dir": "x"}, "'mixture' and 'dir' cannot be combined"),
        ({"mixture": [{"dir": "x", "weight": 1}] * 2}, "a folder twice"),
        ({"mixture": [{"dir": "x", "weight": 0}]}, "greater than 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            config(folder, None, **data)
