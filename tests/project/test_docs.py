"""What the pages quote from the code still stands there; pictures are as their script makes them.

A page names code as [`jddp/file.py:function`](../jddp/file.py). If a Python block follows it, every
line of the block is a line of that function, "..." aside.
"""

import ast
import os
import re
import subprocess
import sys

import optax
import pytest
from runs import ROOT, compiling_as_here, contents
from tiny import MLP, loss_fn, make_batch

import jddp

FOLDERS = ("*.md", "docs/**/*.md", "tests/**/*.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
ANCHOR = re.compile(r"`((?:jddp|examples|tests)/[\w/]+\.py):([\w.]+)`(?:\]\(([^)]*)\))?")
QUOTE = re.compile(ANCHOR.pattern + r"[^`]*?:?\n\n```python\n(.*?)```", re.DOTALL)


def definition(path, name):
    """Source of the function, method or class that `name` stands for in the file, or None."""
    source = (ROOT / path).read_text()
    body = ast.parse(source).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return None
        body = found[0].body
    return ast.get_source_segment(source, found[0])


def test_pages_name_code_that_is_there():
    wrong = []
    for page in PAGES:
        for path, name, link in ANCHOR.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if definition(path, name) is None or (link and target != ROOT / path):
                wrong.append(f"{page.name}: {path}:{name}")
    for page in ROOT.glob("tests/**/README.md"):
        named = re.findall(r"`(?:tests/)?((?:\w+/)+test_\w+\.py)`", page.read_text())
        wrong += [f"{page}: {path}" for path in named if not (ROOT / "tests" / path).exists()]
    assert not wrong


def files_entered(call):
    """The files of jddp whose functions a call runs, in the order in which it first enters them."""
    found, package = {}, f"{ROOT}/jddp/"

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            found[file.removeprefix(f"{ROOT}/")] = True

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [*found]


def test_a_step_enters_the_files_that_the_page_on_architecture_lists_and_no_other():
    ddp, batch = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn), make_batch(16)
    state, _ = ddp.step(ddp.init(0, batch), batch)
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## The way of a batch through a step")[2].partition("\n## ")[0]
    listed = {path for path, *_ in ANCHOR.findall(section.partition("\nRead these")[0])}
    # For a new form of rows alone, and on the devices.
    listed -= {"jddp/reduce/plan.py", "jddp/engine/step.py"}
    entered = files_entered(lambda: ddp.step(state, batch))
    assert {*entered} == listed
    assert len(entered) <= 8


def parts_of(page):
    """The anchors of a page: its headings, as GitHub and the site name them, and its own."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return headings | set(re.findall(r'<a id="([\w-]+)"', text))


def test_links_to_a_part_of_a_page_lead_to_a_heading_or_an_anchor():
    links = [
        (page, target, anchor)
        for page in [*PAGES, *ROOT.glob("benchmarks/*.md")]
        for target, anchor in re.findall(r"\]\(((?:[\w./]+\.md)?)#([\w-]+)\)", page.read_text())
    ]
    assert len(links) > 50
    assert not [
        (page.name, target, anchor)
        for page, target, anchor in links
        if anchor not in parts_of((page.parent / target) if target else page)
    ]


def test_pages_quote_code_as_it_is():
    wrong = []
    for page in PAGES:
        for path, name, _, quoted in QUOTE.findall(page.read_text()):
            lines = {line.strip() for line in definition(path, name).splitlines()}
            others = {line.strip() for line in quoted.splitlines()} - lines - {"", "..."}
            wrong += [f"{page.name}: {path}:{name}: {line}" for line in others]
    assert not wrong
    page = (ROOT / "docs" / "life_of_a_gradient.md").read_text()  # quotes nothing else
    assert page.count("```python") == len(QUOTE.findall(page))


@pytest.mark.slow
def test_the_readme_and_the_page_that_uses_its_names_run_as_pasted(tmp_path):
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/python.md")]
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(pages), re.DOTALL)
    program = "\n".join(blocks)  # of one session: the later ones use the names of the first
    env = {**os.environ, **compiling_as_here(), "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": env, "text": True}
    shown = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)
    assert shown.returncode == 0
    assert "eval 200  loss 0." in shown.stdout
    assert shown.stdout.count(" all-reduce ") >= 2


FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))


def test_pictures_are_as_their_script_makes_them_and_each_stands_in_a_page_with_a_text(tmp_path):
    subprocess.run([sys.executable, FOLDER / "make.py", tmp_path], check=True)
    there = {path.relative_to(FOLDER): path.read_bytes() for path in PICTURES}
    assert contents(tmp_path) == there, "run python docs/pictures/make.py"
    image = re.compile(r"!\[[^]]{21,}\]\((\S+\.svg)\)")
    shown = {
        (x.parent / y).resolve()
        for x in [*PAGES, *ROOT.glob("benchmarks/*.md")]
        for y in image.findall(x.read_text())
    }
    assert shown == set(PICTURES)
