"""Pages, help, errors, comments and docstrings use the terms of docs/glossary.md."""

import ast
import io
import re
import tokenize

from runs import ROOT

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
ROW = re.compile(r"^\| (`.+`) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(GUIDE.partition("## Words that are not used")[2].partition("\n## ")[0])
INSTEAD = {word: terms for words, terms in ROWS for word in re.findall("`(.+?)`", words)}
PHRASES = "|".join(r"\s+".join(map(re.escape, word.split())) for word in INSTEAD)
FORBIDDEN = re.compile(rf"\b({PHRASES})\b(?!/|-all-to-all)", re.I)  # but in paths and in HLO
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
PAGES = [
    *map(ROOT.joinpath, NAMES),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("tests/**/*.md")),
]
PAGES.append(ROOT / "benchmarks" / "README.md")
FOLDERS = ("jddp/**/*.py", "examples/**/*.py", "benchmarks/**/*.py", "docs/**/*.py")
CODE = [path for folder in FOLDERS for path in sorted(ROOT.glob(folder))]


def prose(path):
    """The text of a page, or the strings and comments of a module; without `code`."""
    text = path.read_text()
    if path.suffix == ".py":
        constants = [x.value for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Constant)]
        strings = [value for value in constants if isinstance(value, str)]
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT]
        text = "\n\n".join([*strings, " ".join(comments)])
    return re.sub(r"`[^`\n]+`", "``", text)


def test_only_words_of_the_glossary_are_used():
    assert {"goes on", "one's own", "to the bit"} <= INSTEAD.keys()
    assert FORBIDDEN.search("The run goes\n    on.")
    assert not FORBIDDEN.search("goes_on, ragbag")
    wrong = []
    for path in [*PAGES, *CODE]:
        text = prose(path)
        for found in FORBIDDEN.finditer(text):
            word = " ".join(found[0].lower().split())
            around = text[max(0, found.start() - 40) : found.end() + 40]
            wrong.append(f"{path.relative_to(ROOT)}: {around!r}: for {word!r}, {INSTEAD[word]}")
    assert not wrong
