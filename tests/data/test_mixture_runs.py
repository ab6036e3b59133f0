"""Runs on a mixture of folders: equal on any devices, resumed at the position, and listed."""

import pytest

import jddp
from jddp.commands.summary import opening
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.trainer.job.build import build, train
from jddp.workbench.tokenize import BYTES, write_tokens

pytestmark = pytest.mark.usefixtures("started_devices")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in ("prose", "code"):
        texts = [f"{name[0] * 9}{i} " * (i % 4 + 2) for i in range(60)]
        write_tokens(texts, folder / name, tokenizer=BYTES)
    return folder


def config(folder, run, *, num_devices=2, num_steps=6, **data):
    mixture = [
        {"dir": str(folder / name), "weight": w} for name, w in (("prose", 0.3), ("code", 0.7))
    ]
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
    assert "mixture, an epoch of 0.3 of" in opening(job, "x", "", columns=10_000)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"shuffle": False}, "'mixture' and 'shuffle' cannot be combined"),
        ({"dir": "x"}, "'mixture' and 'dir' cannot be combined"),
        ({"mixture": [{"dir": "x", "weight": 1}] * 2}, "a folder twice"),
        ({"mixture": [{"dir": "x", "weight": 0}]}, "greater than 0"),
    ],
)
def test_mistakes_in_a_mixture_are_one_line(folder, data, said):
    with pytest.raises(ConfigError, match=said):
        config(folder, None, **data)
