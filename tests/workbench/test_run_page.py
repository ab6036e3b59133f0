"""A run leaves its page, however it ends, and never fails because of it."""

import pytest
from runs import at
from tiny import make_batch, wrapped

import jddp
from jddp.workbench import run_page
from jddp.workbench.facts import read_facts


def fail(*_):
    raise ValueError("a <callback> has failed")


def fit(run_dir, num_steps=12, **options):
    options |= {"evaluate": [make_batch(16)], "log_every_steps": 1, "run_dir": run_dir}
    return jddp.fit(wrapped(), [make_batch(16)] * num_steps, num_steps=num_steps, **options)


def page_of(run_dir):
    return (run_dir / "report.html").read_text()


def test_a_run_ends_with_its_page_and_a_longer_one_replaces_it(tmp_path):
    fit(tmp_path)
    page = page_of(tmp_path)
    assert "for 12 of 12 steps<" in page  # and not running, although it holds the lock
    assert "<b>loss</b>" in page
    fit(tmp_path, num_steps=14)
    page = page_of(tmp_path)
    assert "for 14 of 14 steps<" in page
    assert "resumed from step 12 of 14" in page
    assert "until the next step" not in page  # The first start has ended in order.


def test_a_run_that_fails_has_a_page_that_begins_with_the_error(tmp_path):
    with pytest.raises(ValueError, match="a <callback> has failed"):
        fit(tmp_path, callbacks=[at(3, fail)])
    page = page_of(tmp_path)
    assert "<h1>ended by an error after step 4 of 12</h1>" in page
    assert "ValueError: a &lt;callback&gt; has failed" in page
    fit(tmp_path)
    _, after = read_facts(tmp_path).history.starts
    assert after.restore_seconds > 0
    assert (after.resumed_from, after.stepped is not None) == (4, True)
    assert "lost 0 steps (0.0 s)<br>" in page_of(tmp_path)


def test_a_page_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_page, "draw_run", fail)
    assert fit(tmp_path).step == 12
    assert "report is not written: ValueError('a <callback> has failed')" in caplog.messages
    assert not (tmp_path / "report.html").exists()
