"""Packed rows: a document is as alone in its row, and N devices train as one."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from sweeps import swept

import jddp
from jddp.data.sources.tokens import PackedExamples
from jddp.ground.errors import ConfigError
from jddp.zoo.losses import next_token
from jddp.zoo.models.transformer import GPT

pytestmark = pytest.mark.usefixtures("started_devices")

make = functools.partial(GPT, vocab_size=32, num_layers=2, num_heads=2, width=16, max_length=12)
FORMS = {"plain": {}, "scan": {"scan_layers": True}}
FORMS["remat"] = {"remat": True, "embedding_gradient": "one_hot"}
DOCUMENTS = [5, 3, 4]


def row_of(*documents, length=12):
    """The documents in a row: tokens, and segments."""
    tokens, segments = np.zeros((2, 1, length), np.int32)
    tokens[0, : sum(map(len, documents))] = np.concatenate(documents)
    numbers = np.repeat(np.arange(len(documents)) + 1, [*map(len, documents)])
    segments[0, : len(numbers)] = numbers
    return tokens, segments


def some_documents(lengths=DOCUMENTS):
    return [np.random.default_rng(n).integers(0, 32, n, np.int32) for n in lengths]


def made(**options):
    """A compiled model, with its first parameters: a function of tokens and segments."""
    model = make(**options)
    values = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    return functools.partial(jax.jit(model.apply), values)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_a_document_in_a_packed_row_has_the_logits_that_it_has_alone(options):
    apply = made(**options)
    documents = some_documents()
    tokens, segments = row_of(*documents, length=12)
    packed = apply(tokens, segments=segments)[0]
    ends = np.cumsum(DOCUMENTS)
    for document, logits in zip(documents, np.split(packed, ends)[:3], strict=True):
        alone = apply(document[None])[0]
        # Sums over the keys of a row have another order than over those of a document.
        np.testing.assert_allclose(logits, alone, atol=2e-6)
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
    examples = PackedExamples(tokens, documents=[begins], sequence_length=12)
    return examples.take(np.arange(16))


@pytest.mark.parametrize("options", swept({"parts": {"accumulate_steps": 2}, "plain": {}}, every=2))
def test_steps_of_packed_rows_on_devices_equal_those_on_one(options):
    batch = packed_batch()
    assert 0 < batch["mask"].mean() < 1
    counts = batch["mask"].reshape(4, -1).sum(1)
    assert len({*counts}) > 1  # so a mean of means would be another
    report = jddp.verify(make(), optax.sgd(0.1), next_token, batch, mesh=4, **options)
    assert report.passed, report


def test_a_model_without_segments_is_refused():
    batch = packed_batch()
    model = nn.Embed(32, 32)
    with pytest.raises(ConfigError, match="holds segments, .*documents=cross"):
        jddp.DataParallel(model, optax.sgd(0.1), next_token, mesh=2).init(0, batch)
