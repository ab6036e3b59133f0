"""The commit of the code around a run is read from the files of git."""

import subprocess

import pytest
from runs import ROOT

from jddp.config.versions import commit_of


def git(*arguments, folder):
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *named, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a commit, and its name."""
    git("init", "-q", folder=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "first", folder=tmp_path)
    return tmp_path, git("rev-parse", "HEAD", folder=tmp_path).strip()


def test_the_commit_of_a_branch_of_packed_refs_of_none_and_of_a_worktree_is_found(checkout):
    folder, commit = checkout
    (folder / "code").mkdir()
    assert commit_of(folder / "code") == commit
    git("pack-refs", "--all", folder=folder)
    assert commit_of(folder) == commit
    git("worktree", "add", "-q", "-b", "other", str(folder / "tree"), folder=folder)
    assert commit_of(folder / "tree") == commit
    git("checkout", "-q", "--detach", folder=folder)
    assert commit_of(folder) == commit


def test_a_folder_without_a_commit_has_none(tmp_path, monkeypatch):
    assert commit_of(tmp_path) == ""
    git("init", "-q", folder=tmp_path)
    assert commit_of(tmp_path) == ""
    (tmp_path / ".git" / "HEAD").write_bytes(b"\xff")
    assert commit_of(tmp_path) == ""
    assert len(commit_of(ROOT)) == len("fde982e4" * 5) or not (ROOT / ".git").exists()
