"""`jddp` lists and runs its commands; `jddp init` starts a project, which leads to an export."""

import csv
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from data_files import file_of, write_images
from house import PACKAGE
from runs import ROOT, environment

import jddp
from jddp.__main__ import COMMANDS, SHARED, WORKBENCH, main
from jddp.data import make_source
from jddp.ground import errors


@pytest.mark.parametrize("arguments, code", [("", 2), ("train.num_steps=1", 2), ("--help -h", 0)])
def test_it_prints_the_commands_and_trains_nothing(arguments, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for argument in arguments.split() or [None]:
        assert main([argument] if argument else []) == code
        lines = capsys.readouterr().out.splitlines()
        assert "jddp train" in "\n".join(lines)
        assert max(map(len, lines)) <= 80
        assert len(lines) < 24
    assert not list(tmp_path.iterdir())


def test_the_module_is_run_and_its_list_imports_no_library():
    command = [sys.executable, "-X", "importtime", "-m", "jddp", "-h"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "jddp train" in shown.stdout
    assert re.findall(r"\| +(jddp|jax|numpy)$", shown.stderr, re.M) == ["jddp"]


def test_it_prints_the_version_and_those_of_what_results_depend_on(capsys):
    assert main(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split() == ["jddp", jddp.__version__]
    assert {"python", "jax", "flax", "optax"} <= {line.split()[0] for line in others}


def test_every_command_of_the_package_is_named_and_the_console_script_is_the_same(capsys):
    paths = (PACKAGE / "commands").glob("*.py")
    files = {path.stem for path in paths if "def main(" in path.read_text()}
    assert files | SHARED.keys() == COMMANDS.keys() - WORKBENCH
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jddp": f"jddp.__main__:{main.__name__}"}
    assert main(["evalute"]) == 2
    assert "no command 'evalute'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_run_as_its_module_is_and_its_help_fits_a_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert f"jddp {name}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_error_ends_with_one_of_the_exit_codes_and_each_is_printed_as_its_number():
    kinds = [x for x in vars(errors).values() if isinstance(x, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.Error)}
    assert codes <= set(errors.ExitCode)
    for code in errors.ExitCode:
        assert f"{code}" == str(code) == str(int(code))  # in words that the launcher reads again


def transcript():
    """The commands of docs/command_line.md that follow the installation, a line each."""
    page = (ROOT / "docs" / "command_line.md").read_text()
    section = page.partition("## From installation to export")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```console\n(.*?)```", section, re.S)
    lines = re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.M)
    assert lines[0].startswith("pip install")
    return lines[1:]


def write_clothes(folder):
    """Images of clothes as a user has them: folders of classes for training and test, new ones."""
    data, files = make_source("fashion_mnist").load(), {}
    for part, examples, count in (("train", data.train, 640), ("test", data.test, 160)):
        rows = examples.take(np.arange(count))
        images = rows["image"][..., 0] - rows["image"].min()
        pixels = (images / images.max() * 255).astype(np.uint8)
        for i, (image, label) in enumerate(zip(pixels, rows["label"].tolist(), strict=True)):
            files[f"images/{part}/class_{label}/{i:03}.png"] = file_of(image)
    write_images(folder, files)
    (folder / "new_images").mkdir()
    for path in sorted(folder.glob("images/test/class_[0-2]/*")):
        path.rename(folder / "new_images" / f"{path.parent.name}-{path.name}")
    for i in range(3):  # of each class one stays in the test
        path = next(folder.glob(f"new_images/class_{i}-*"))
        path.rename(folder / "images" / "test" / f"class_{i}" / path.name)


def test_a_project_is_written_once_into_a_new_folder(tmp_path, capsys):
    assert main(["init", str(tmp_path / "a" / "mine")]) == 0
    names = ["config.yaml", "data.py", "loss.py", "model.py"]
    assert sorted(path.name for path in (tmp_path / "a" / "mine").iterdir()) == names
    shown = capsys.readouterr().out
    assert f"holds {', '.join(names)}\nStart with: cd {tmp_path}/a/mine && jddp train" in shown
    for folder, code, reported in (("a", 2, "is not empty"), ("a/mine/data.py", 74, "be written")):
        assert main(["init", str(tmp_path / folder)]) == code
        assert reported in capsys.readouterr().err
    assert len(list((tmp_path / "a").rglob("*.*"))) == 4


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_predictions_and_an_export(tmp_path):
    commands = transcript()
    assert len(commands) < 10
    script = "set -e\n" + "\n".join(commands).replace("cd shapes", "cd shapes && mv ../*images .")
    write_clothes(tmp_path)
    jddp = f'jddp() {{ "{sys.executable}" -m jddp "$@"; }}\n'
    options = {"cwd": tmp_path, "env": environment(), "text": True, "capture_output": True}
    done = subprocess.run(["bash", "-c", jddp + script], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = re.findall(r"^step \d+ .* accuracy ([\d.]+)  examples", done.stdout, re.M)
    assert float(accuracies[-1]) > 0.35  # of ten classes, of which chance gets one in ten
    project = tmp_path / "shapes"
    with open(project / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert [x["file"] for x in rows] == sorted(x.name for x in (project / "new_images").iterdir())
    classes = sorted(x.name for x in (project / "images" / "train").iterdir())
    assert list(rows[0])[:12] == ["file", "label", *(f"probability.{name}" for name in classes)]
    assert len(rows[0]) == 12 + 10
    assert {x["label"] for x in rows} <= {*classes}
    assert (project / "mine.safetensors").stat().st_size > 5000
