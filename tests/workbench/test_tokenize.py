"""Token files, written from text and read back, and refused where they are damaged."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from data_files import rows_of

from jddp.commands.prepare import data_command as main
from jddp.data import make_source
from jddp.data.source import spec_of
from jddp.ground.errors import ConfigError, DataError
from jddp.workbench.tokenize import BYTES, documents_in, tokenizer_in, write_tokens

TEXTS = [f"document {i} of some length " * (i % 3 + 1) for i in range(40)]


def written(tmp_path, tokenizer=None, **options):
    directory = tmp_path / "tokens"
    return directory, write_tokens(TEXTS, directory, tokenizer=tokenizer or BYTES, **options)


def test_text_that_is_written_as_tokens_is_read_back(tmp_path):
    directory, index = written(tmp_path, shard_tokens=300)
    kwargs = {"sequence_length": 1, "documents": "pack"}
    source = make_source("tokens", directory=str(directory), kwargs=kwargs)
    data = source.load()
    assert spec_of(data.train) == source.spec
    assert json.loads((directory / "tokens.json").read_text()) == index
    seen, counts = [], {"train": 0, "test": 0}
    documents = list(directory.glob("*.documents.npy"))
    for path in documents:
        shard = np.load(path.with_name(path.name.replace(".documents", ""))).astype(np.uint8)
        texts = np.split(shard, np.load(path)[1:])
        seen += [bytes(text).removesuffix(b"\0").decode() for text in texts]
        counts[path.name.partition("-")[0]] += len(shard)
    assert sorted(seen) == sorted(TEXTS)
    assert counts == index["tokens"]
    assert len(documents) > 3
    predicted = sum(rows_of(part)["mask"].sum() for part in (data.train, data.test))
    assert predicted == sum(counts.values()) - len(TEXTS)  # all but the first of a document


@pytest.mark.parametrize("token", [-1, 300, 2**16 + 1])
def test_a_token_beyond_the_vocabulary_is_refused_and_does_not_wrap(tmp_path, token):
    for encoded in ([1, token], np.array([1, token])):
        coder = dataclasses.replace(BYTES, encode=lambda text, x=encoded: x)
        with pytest.raises(ConfigError, match=f"gives token {token}, and its vocab_size is 256"):
            written(tmp_path, coder)


def test_a_tokenizer_of_hugging_face_writes_its_own_tokens(tmp_path):
    import tokenizers

    words = sorted({word for text in TEXTS for word in text.split()} | {"[UNK]", "<end>"})
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    directory, index = written(tmp_path, tokenizer_in(path, end_of_document="<end>"))
    assert (index["tokenizer"], index["vocab_size"]) == ("words.json", len(words))
    assert sum(index["bytes"].values()) == sum(len(text) for text in TEXTS)
    source = make_source("tokens", directory=str(directory), kwargs={"sequence_length": 2})
    assert source.bytes_per_token == index["bytes"]["test"] / index["tokens"]["test"] > 3
    texts = " ".join(words[i] for i in np.load(directory / "train-00000.npy")).split(" <end>")
    assert set(" ".join(t.split()) for t in texts if t) < {" ".join(t.split()) for t in TEXTS}
    with pytest.raises(ConfigError, match="has no token '<eos>'"):
        tokenizer_in(path, end_of_document="<eos>")
    with pytest.raises(ConfigError, match=r"nothing\.json: not a Hugging Face tokenizer file"):
        tokenizer_in(tmp_path / "nothing.json")


def test_documents_are_files_and_lines_of_jsonl(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in (
        *(("b/two.txt", b"two"), ("b/one.txt", b"one"), ("bad.txt", b"abc\xff")),
        ("three.jsonl", b'{"text": "three"}\n{"text": "four"}\n'),
        ("bad.jsonl", b'{"text": "three"}\n{"txt": 3}\n'),
        ("null.jsonl", b'{"text": null}\n'),
        ("half.jsonl", b'{"text": "\\ud83d"}\n'),
    ):
        (tmp_path / name).write_bytes(content)
    found = documents_in([tmp_path / "b", tmp_path / "three.jsonl"])
    assert [*found] == ["one", "two", "three", "four"]
    for name, message in (
        ("bad.jsonl", 'line 2 is not an object with "text"'),
        ("null.jsonl", 'line 1 is not an object with "text"'),
        ("half.jsonl", 'line 1 is not an object with "text"'),
        ("bad.txt", "not UTF-8 at byte 3"),
        ("none.txt", "No such file"),
    ):
        with pytest.raises(DataError, match=message):
            [*documents_in([tmp_path / name])]


def test_bad_token_files_are_named_with_the_place(tmp_path):
    directory, _ = written(tmp_path)
    for index in ("{", "{}", '{"vocab_size": null}'):
        (directory / "tokens.json").write_text(index)
        with pytest.raises(DataError, match=r"tokens\.json: not a whole index"):
            make_source("tokens", directory=str(directory), kwargs={"sequence_length": 8})
    with pytest.raises(ConfigError, match=r"holds \.npy files already"):
        written(tmp_path)
    with pytest.raises(DataError, match="test got no document"):
        write_tokens(TEXTS[:1], tmp_path / "few", tokenizer=BYTES)


def test_the_command_writes_tokens_and_says_how_to_train(tmp_path, capsys):
    texts = [str(tmp_path / f"{i}.txt") for i in range(len(TEXTS))]
    for path, text in zip(texts, TEXTS, strict=True):
        Path(path).write_text(text)
    assert main(["tokenize", str(tmp_path / "out"), *texts]) == 0
    said = capsys.readouterr().out
    assert f"data.name=tokens data.dir={tmp_path / 'out'}" in said
    assert "vocab_size 256" in said
    assert main(["tokenize", str(tmp_path / "out"), *texts]) == 2
    assert "holds .npy files already" in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "more"), str(tmp_path / "none")]) == 65
