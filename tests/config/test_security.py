"""Data stay data: nothing that is read runs, nothing that is written shows what it should not."""

import ast
import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runs import environment, write_sealed
from tiny import make_batch, wrapped

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.folders import find_damage
from jddp.commands.training import _turn_on_cache
from jddp.config.files import dump_values, flatten, load_config, read_yaml
from jddp.config.schema import Config
from jddp.distributed.join import bind_address
from jddp.ground.errors import ConfigError, Error, FileSystemError
from jddp.ground.files import private_cache, refuse_foreign

PACKAGE = Path(jddp.__file__).parent
RUN_CODE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SECRET = "xyzzy-4711-canary"


def train(folder):
    return jddp.fit(wrapped(), [make_batch(8)] * 3, num_steps=3, run_dir=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run; nobody changes it."""
    return train(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained.run_dir, tmp_path / "run")


def can_run(node):
    """Whether a piece of code reads what can run."""
    match node:
        case ast.Import(names=names):
            return bool({alias.name.partition(".")[0] for alias in names} & RUN_CODE)
        case ast.ImportFrom(module=module):
            return module.partition(".")[0] in RUN_CODE
        case ast.Call(func=ast.Name(id=name)):
            return name in ("eval", "exec")
        case ast.Call(func=ast.Attribute(attr="load" | "read_array", value=owner), keywords=given):
            refused = {x.arg: ast.unparse(x.value) for x in given}.get("allow_pickle") == "False"
            return ast.unparse(owner).startswith("np") and not refused
    return False


def test_no_module_reads_what_can_run():
    assert not [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if can_run(node)
    ]


WATCHED = """
import sys
found = []
sys.addaudithook(lambda event, what: event == "pickle.find_class" and found.append(what))
from jddp.commands.train import main
options = ["train.num_steps=4", "checkpoint.every_steps=2", "run.dir=run", "mesh.num_devices=2"]
options += ["train.log_every_steps=1", "data.global_batch_size=8", "checkpoint.keep=9"]
assert main(options) == 0
import shutil
shutil.rmtree("run/checkpoints/4")
assert main(options) == 0
import jddp
jddp.open_run("run")
assert main(["train.num_steps=9", "run.dir=odd", "optimizer.learning_rate=1e38"]) == 80
assert not found, found
"""


@pytest.mark.slow
def test_a_run_a_resume_and_a_load_unpickle_nothing_and_tell_no_secret(tmp_path):
    variables = environment(API_TOKEN=SECRET, XDG_CACHE_HOME=str(tmp_path / "cache"))
    options = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
    said = subprocess.run([sys.executable, "-c", WATCHED], check=False, **options)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "resumed from step 2" in said.stdout
    assert (tmp_path / "odd" / "nonfinite").exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 20
    for text in (said.stdout.encode(), said.stderr.encode(), *(x.read_bytes() for x in written)):
        assert SECRET.encode() not in text
    private = [tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "cache/jddp/xla"]
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in private] == ["0o700"] * 3


@pytest.mark.parametrize(
    "section, trust", [("model", None), ("model", "package"), ("data", "package"), ("loss", None)]
)
def test_a_run_directory_that_names_a_command_runs_none(tmp_path, monkeypatch, section, trust):
    monkeypatch.chdir(tmp_path)
    command = {"target": "os:system", "kwargs": {"command": "touch canary"}}
    config = Config(**{"train": {"num_steps": 1}, "model": {"name": "mlp"}, section: command})
    (tmp_path / "config.yaml").write_text(dump_values(config.model_dump()))
    refusal = "no Flax module class" if trust else "'os:system', which .* is not imported"
    with pytest.raises(Error, match=refusal if section == "model" else "checkpoint"):
        jddp.open_run(tmp_path, trust=trust)
    assert not (tmp_path / "canary").exists()


# Each list holds the one before nine times.
LAUGHS = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
LAUGHS = "\n".join(["a0: &a0 [x]", *LAUGHS])
NO_CONFIGS = ["model: !!python/object/apply:os.system [touch canary]", LAUGHS, "a: &a [*a]"]
NO_CONFIGS += ["model: !!python/name:os.system", "[" * 10_000]
NO_CONFIGS += ["seed: 1\nseed: 2", "\0", "- 3", "train: {a: 1", "3"]


def test_yaml_of_no_config_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in NO_CONFIGS:
        Path("config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: ") as caught:
            load_config(["config.yaml"])
        assert "\n" not in str(caught.value)
        assert not Path("canary").exists()
    Path("config.yaml").write_text("")
    assert read_yaml(Path("config.yaml")) == {}


def test_a_checkpoint_cannot_be_kept_outside_of_its_run_nor_lead_there(run_dir, trained):
    for name in ("../out", "a/b", "/tmp/out", ".", "..", "", "a b", "-x", "ü"):
        with pytest.raises(ConfigError, match="not a plain name"):
            trained.save(name)
    assert [path.name for path in trained.run_dir.parent.iterdir()] == ["run"]
    folder = run_dir / "checkpoints"
    os.symlink(trained.run_dir / "checkpoints/3", folder / "4")
    with contextlib.closing(CheckpointFolder(folder, keep=1)) as checkpoints:
        assert checkpoints.steps() == [3]  # A link is no checkpoint.
    (folder / "secret").write_text("x")
    (folder / "3" / "SHA256SUMS").write_text(f"# 1 files\n{'0' * 64}  ../secret\n")
    assert find_damage(folder / "3") == "../secret is missing, or a link"


def test_a_directory_of_somebody_else_is_not_used_and_a_private_one_is_closed(
    run_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jddp" / "c").mkdir(parents=True, mode=0o755)
    folders = [private_cache(name, "the cache") for name in ("a", "c")]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(FileSystemError, match=r"run\.dir .* belongs to user") as caught:
        train(run_dir)
    assert caught.value.exit_code == 74
    with pytest.raises(FileSystemError, match="belongs to user"):
        private_cache("xla", "the cache")
    refuse_foreign(tmp_path / "absent", "run.dir")


def test_a_cache_that_cannot_be_private_is_not_used(tmp_path, monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.setenv(f"JAX_PERSISTENT_CACHE_{name}", "0")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user id without a passwd entry
    (tmp_path / "a file").mkdir()
    (tmp_path / "a file" / "jddp").touch()
    (folder := tmp_path / "open" / "jddp" / "xla").mkdir(parents=True)
    folder.chmod(0o777)
    is_off = "Until then the cache is off"
    for name, reported in ((None, "names a home"), ("a file", is_off), ("open", is_off)):
        if name:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        _turn_on_cache()
        assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
        (line,) = capsys.readouterr().err.splitlines()
        assert reported in line


def test_process_zero_listens_where_it_is_called_if_that_is_here(monkeypatch):
    for coordinator in ("127.0.0.1:1234", "127.0.0.5:1234", "[::1]:1234"):
        assert bind_address(coordinator) == coordinator
    for coordinator in ("192.0.2.1:1234", "no.such.host.invalid:1234"):  # of nobody
        assert bind_address(coordinator) == "[::]:1234"
    # A name of this machine that means loopback says nothing.
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    assert bind_address("node-0:1234") == "[::]:1234"
    assert bind_address("localhost:1234") == "127.0.1.1:1234"


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
MAPPINGS = st.dictionaries(st.sampled_from([*Config.model_fields, "x"]), VALUES, max_size=5)


@settings(FUZZ, max_examples=200)
@given(MAPPINGS.map(json.dumps) | st.text(max_size=200) | st.binary(max_size=200))
def test_any_values_or_bytes_are_a_config_or_a_list_of_mistakes(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with contextlib.suppress(Error):
        load_config([str(file)])


@settings(FUZZ, max_examples=200)
@example(["[=", "[a=1"])
@given(st.lists(st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=9), st.text())))
def test_any_overrides_are_a_config_or_a_list_of_mistakes(overrides):
    with contextlib.suppress(Error):
        load_config([], overrides)


FORGED = [*({"skipped": x} for x in ([None, 0], None, [1], [0, {}])), {"evaluations": None}]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_a_run_whose_data_have_another_form_is_refused(run_dir, forged):
    checkpoint = run_dir / "checkpoints" / "3"
    beside = json.loads((checkpoint / "run.json").read_text())
    write_sealed(checkpoint, "run.json", json.dumps(beside | forged))
    with pytest.raises(FileSystemError, match="a run.json that this version of jddp cannot"):
        train(run_dir)
