"""Pages of HTML in one file, which load nothing: light or dark, on paper and on a phone.

Path("step.html").write_text(make_page("A step", f"<h1>...</h1>{table(['ms'], [['12']])}"))
"""

from collections.abc import Collection, Sequence
from html import escape
from string import Template

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2em auto; max-width: 1100px;
  padding: 0 1em; color: #222; background: #fff }
h1 { font-size: 1.25em; line-height: 1.3 } h2 { font-size: 1.05em; margin-top: 1.6em }
.note { color: #666 } .wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em .2em 0; text-align: left; vertical-align: top; white-space: nowrap }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 14em }
td.number, th.number { text-align: right } tr { border-bottom: 1px solid #8884 }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact }
@media (prefers-color-scheme: dark) { @media screen {
  body { color: #ddd; background: #161819 } .note { color: #999 }
} }
@media print { body { font-size: 10px; max-width: none } tr { break-inside: avoid } }
$style</style></head><body>
$body
$script</body></html>
""")


def make_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Returns a page.

    Args:
      title: Title, as text.
      body: What it shows, as HTML.
      style: Style sheets of its own.
      script: A script that runs once it is read.
    """
    ending = f"<script>{script}</script>\n" if script else ""
    return _PAGE.substitute(title=escape(title), body=body, style=style.lstrip(), script=ending)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()
) -> str:
    """Returns a table.

    Args:
      head: Heads of its columns, as HTML. The second column has names, which may break.
      rows: Cells, as HTML.
      numbers: Columns with numbers, which are aligned at the right.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = ["number" if i in numbers else "name" if i == 1 else "" for i in range(len(cells))]
        made = (f'<{tag} class="{kind}">{x}</{tag}>' for kind, x in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>\n"

    return f"<table>\n{row('th', head)}{''.join(row('td', x) for x in rows)}</table>"
