"""`jddp init` starts a project, which leads from its own images to predictions and an export."""

import csv
import re
import subprocess
import sys

import numpy as np
import pytest
from runs import ROOT, environment

from jddp.__main__ import main
from jddp.data import make_source


def transcript():
    """The commands of docs/command_line.md that follow the installation, a line each."""
    page = (ROOT / "docs" / "command_line.md").read_text()
    section = page.partition("## From installation to export")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```console\n(.*?)```", section, re.S)
    lines = re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.M)
    assert lines[0].startswith("pip install")
    return lines[1:]


def write_images(folder):
    """Images of clothes as a user has them: folders of classes for training and test, new ones."""
    from PIL import Image

    data = make_source("fashion_mnist").load()
    for part, examples, count in (("train", data.train, 640), ("test", data.test, 160)):
        rows = examples.take(np.arange(count))
        images = rows["image"] - rows["image"].min()
        for i, (image, label) in enumerate(zip(images, rows["label"].tolist(), strict=True)):
            path = folder / "images" / part / f"class_{label}" / f"{i:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image[..., 0] / images.max() * 255).astype(np.uint8)).save(path)
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
    write_images(tmp_path)
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
