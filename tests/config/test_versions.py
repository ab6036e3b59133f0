"""The commit of the code around a run is the one that git names."""

import subprocess

from runs import ROOT

from jddp.config.versions import commit_of


def git(*arguments, folder):
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *named, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_of_a_folder_inside_a_checkout_is_found_and_elsewhere_there_is_none(
    tmp_path, monkeypatch
):
    assert commit_of(tmp_path) == commit_of(tmp_path / "absent") == ""
    git("init", "-q", folder=tmp_path)
    assert commit_of(tmp_path) == ""
    git("commit", "-q", "--allow-empty", "-m", "first", folder=tmp_path)
    (tmp_path / "code").mkdir()
    assert commit_of(tmp_path / "code") == git("rev-parse", "HEAD", folder=tmp_path).strip()
    assert len(commit_of(ROOT)) == 40 or not (ROOT / ".git").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == ""
