"""Whatever stands in a config or a checkpoint: it is taken, or refused in words of jddp's own."""

import contextlib
import json
import shutil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runs import write_sealed
from tiny import make_batch, wrapped

import jddp
from jddp.config.files import flatten, load_config
from jddp.config.schema import Config
from jddp.ground.errors import Error, FileSystemError

OPTIONS = flatten(Config(train={"num_steps": 1}).model_dump())
KEYS = sorted({part for key in OPTIONS for part in key.split(".")})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def taken_or_refused(act):
    """What it returns; None if it raises an error of jddp's own, and no other."""
    with contextlib.suppress(Error):
        return act()


MAPPINGS = st.dictionaries(st.sampled_from([*Config.model_fields, "x"]), VALUES, max_size=5)


@settings(FUZZ, max_examples=200)
@given(MAPPINGS.map(json.dumps) | st.text(max_size=200) | st.binary(max_size=200))
def test_any_values_or_bytes_are_a_config_or_a_list_of_mistakes(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    taken_or_refused(lambda: load_config([str(file)]))


@settings(FUZZ, max_examples=200)
@example(["[=", "[a=1"])
@given(st.lists(st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=9), st.text())))
def test_any_overrides_are_a_config_or_a_list_of_mistakes(overrides):
    taken_or_refused(lambda: load_config([], overrides))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run; nobody changes it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return jddp.fit(wrapped(), [make_batch(8)] * 2, num_steps=2, run_dir=folder).run_dir


FORGED = [*({"skipped": x} for x in ([None, 0], None, [1], [0, {}])), {"evaluations": None}]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_a_run_whose_data_have_another_form_is_refused(run_dir, tmp_path, forged):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    checkpoint = folder / "checkpoints" / "2"
    beside = json.loads((checkpoint / "run.json").read_text())
    write_sealed(checkpoint, "run.json", json.dumps(beside | forged))
    with pytest.raises(FileSystemError, match="a run.json that this version of jddp cannot"):
        jddp.fit(wrapped(), [make_batch(8)] * 3, num_steps=3, run_dir=folder)
