"""A cache of `datasets` in each test's own folder; it would be in the user's home."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
