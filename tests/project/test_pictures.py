"""The pictures of the pages are as docs/pictures/make.py makes them, and can be read."""

import importlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from runs import ROOT, contents

from jddp.reduce.backward import trace_backward
from jddp.reduce.plan import plan_buckets

FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
SVG = {"svg": "http://www.w3.org/2000/svg"}


@pytest.fixture
def script(monkeypatch):
    """A function that imports a module of docs/pictures."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_pictures_are_as_their_script_makes_them_and_each_stands_in_a_page_with_a_text(tmp_path):
    subprocess.run([sys.executable, FOLDER / "make.py", tmp_path], check=True)
    there = {path.relative_to(FOLDER): path.read_bytes() for path in PICTURES}
    assert contents(tmp_path) == there, "run python docs/pictures/make.py"
    image = re.compile(r"!\[[^]]{21,}\]\((\S+\.svg)\)")
    shown = {(x.parent / y).resolve() for x in PAGES for y in image.findall(x.read_text())}
    assert shown == set(PICTURES)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_a_description_and_its_text_is_inside_and_large(path, script):
    picture = ElementTree.parse(path).getroot()
    assert picture.get("aria-labelledby") == "title desc"
    assert len(picture.findtext("svg:title", "", SVG)) > 10
    assert len(picture.findtext("svg:desc", "", SVG)) > 100
    _, _, width, height = map(float, picture.get("viewBox").split())
    for text in picture.iterfind("svg:text", SVG):
        size, at = float(text.get("font-size")), float(text.get("x"))
        assert size * 360 / width > 11, "too small on a phone"
        wide = script("canvas").text_width(text.text, size, text.get("class", ""))
        left = at - wide * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert left >= 0, text.text
        assert left + wide <= width, text.text
        assert size <= float(text.get("y")) <= height - 4, text.text


def test_text_has_the_contrast_that_wcag_asks_for_on_light_and_dark_fills(script):
    def luminance(colour):
        """The relative luminance of "#rrggbb", as in WCAG 2.2."""
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(x * y for x, y in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    canvas = script("canvas")
    for is_dark in (0, 1):
        for ink in (canvas.INK[is_dark], canvas.QUIET[is_dark]):
            for kind, colours in canvas.COLOURS.items():
                pair = sorted([luminance(ink), luminance(colours[2 * is_dark])])
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (kind, ink)


def test_the_picture_of_buckets_is_the_plan_for_its_network(script):
    step = script("a_step")
    sizes = step.LAYERS.items()
    params = {k: {"bias": jnp.zeros(b), "kernel": jnp.zeros((a, b))} for k, (a, b) in sizes}

    def loss(params):
        x = jnp.ones((1, 784))
        for layer in sorted(params):
            x = jax.nn.relu(x @ params[layer]["kernel"] + params[layer]["bias"][None])
        return x.sum()

    ready = trace_backward(jax.vjp(loss, params)[1]).ready
    plan = plan_buckets(params, bucket_bytes=step.LIMITS, ready=ready)
    assert [[*bucket.paths] for bucket in plan.buckets] == step.fill()
    assert [bucket.bytes for bucket in plan.buckets] == [*map(step.bytes_of, step.fill())]
