"""The pictures of the pages are as docs/pictures/make.py makes them."""

import re
import subprocess
import sys

from runs import ROOT, contents

FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


def test_pictures_are_as_their_script_makes_them_and_each_stands_in_a_page_with_a_text(tmp_path):
    subprocess.run([sys.executable, FOLDER / "make.py", tmp_path], check=True)
    there = {path.relative_to(FOLDER): path.read_bytes() for path in PICTURES}
    assert contents(tmp_path) == there, "run python docs/pictures/make.py"
    image = re.compile(r"!\[[^]]{21,}\]\((\S+\.svg)\)")
    shown = {(x.parent / y).resolve() for x in PAGES for y in image.findall(x.read_text())}
    assert shown == set(PICTURES)
