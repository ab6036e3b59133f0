r"""A picture as SVG text: for light and dark pages, for phones, and for screen readers.

    picture = Picture("Title.\n\nWhat the picture shows, in words.")
    picture.box(16, 40, 96, 28, "update", "same")
    text = picture.svg(height=90)

A picture has paper of its own, since it is light or dark as the system is, and a page may not be.
The width of text is estimated for a wide font, and text that does not fit is refused. This module
knows shapes and colours, and nothing of what they show.
"""

import inspect
from xml.sax.saxutils import escape, quoteattr

WIDTH = 440.0  # units; so few that text of 14 can be read on a phone of 360 pixels
ZOOM = 1.2  # pixels a unit, where the page is wide enough
EDGE = 16.0  # units that stay empty at the left and the right
INNER, MIDDLE = WIDTH - 2 * EDGE, WIDTH / 2
TEXT, SMALL = 15.0, 14.0  # font sizes
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif'
CODE = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'

# Fill and outline of each kind of shape on light paper, then on dark.
COLOURS = {
    "paper": ("#ffffff", "#d1d9e0", "#0d1117", "#3d444d"),
    "rows": ("#ddf4ff", "#0969da", "#0c2d52", "#4493f8"),
    "own": ("#ffe9d6", "#bc4c00", "#4a2400", "#e0823d"),
    "same": ("#dafbe1", "#1a7f37", "#0f3a1c", "#3fb950"),
    "sent": ("#efe4ff", "#8250df", "#33235c", "#ab7df8"),
    "bad": ("#ffe3e0", "#cf222e", "#51191c", "#f85149"),
    "plain": ("#f1f3f5", "#818b98", "#20262e", "#767f8a"),
}
INK, QUIET = ("#1f2328", "#e6edf3"), ("#57606a", "#a5adb8")
# Widths of characters as parts of the font size, in DejaVu Sans, which is wide.
EMS = {0.33: "ijlI' ", 0.41: "frt.,:;()[]/-|", 0.56: "cszJ", 0.78: "GHNOQDU", 0.84: "w=+"}
EM = {char: ems for ems, chars in EMS.items() for char in chars} | dict.fromkeys("mMW%@", 1.0)


def text_width(text: str, size: float, style: str = "") -> float:
    """Estimates the width of a line of text of this font size; see `Picture.text` for styles."""
    if "code" in style:
        return 0.605 * size * len(text)
    ems = sum(EM.get(char, 0.7 if char.isupper() else 0.64) for char in text)
    return ems * size * (1.12 if "strong" in style else 1.0)


class Picture:
    """A picture of the width `WIDTH`, drawn from the top.

    Args:
      about: The title in the first line, and below it what the picture shows, in words.
      facts: More of these words.
    """

    def __init__(self, about: str | None, *facts: str) -> None:
        title, _, shown = inspect.cleandoc(about or "").partition("\n\n")
        words = " ".join([*shown.split(), *facts])
        self._names = [
            f'<title id="title">{escape(title.rstrip("."))}</title>',
            f'<desc id="desc">{escape(words)}</desc>',
        ]
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, *, dashed: bool = False
    ) -> None:
        """Draws a rectangle of a kind of `COLOURS`, or only its outline where it is dashed."""
        look = ' fill-opacity="0" stroke-dasharray="4 4"' if dashed else ""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="{kind}" {at} rx="4"{look}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        style: str = "",
        *,
        anchor: str = "start",
        room: float = INNER,
    ) -> None:
        """Writes a line of text.

        Args:
          x: Left end, middle or right end, as `anchor` has it.
          y: Base line.
          text: The text.
          style: Words out of "code", "strong" and "quiet"; code and quiet text are smaller.
          anchor: "start", "middle" or "end".
          room: Width that it has to fit in.

        Raises:
          ValueError: If it is wider than `room`.
        """
        size = SMALL if {"code", "quiet"} & {*style.split()} else TEXT
        width = text_width(text, size, style)
        if width > room:
            raise ValueError(f"{text!r} is {width:.0f} wide, in a room of {room:.0f}. Shorten it.")
        look = f' class="{style}"' * bool(style)
        at = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._parts.append(f"<text{look} {at}>{escape(text)}</text>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str,
        kind: str,
        *,
        style: str = "",
    ) -> None:
        """Draws a rectangle with a line of text in its middle."""
        self.rect(x, y, width, height, kind)
        self.text(x + width / 2, y + height / 2 + 5, text, style, anchor="middle", room=width)

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draws a dot in the colour of the outlines of a kind of `COLOURS`."""
        self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="6"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draws a line."""
        self._parts.append(f'<path class="line" d="M{x0:g} {y0:g}L{x1:g} {y1:g}"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draws an arrow, level or upright, to the second point."""
        along = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        back = x1 - 6 * along[0], y1 - 6 * along[1]
        side = 4 * along[1], 4 * along[0]
        head = f"M{back[0] + side[0]:g} {back[1] + side[1]:g}L{x1:g} {y1:g}"
        head += f"L{back[0] - side[0]:g} {back[1] - side[1]:g}z"
        self.line(x0, y0, *back)
        self._parts.append(f'<path class="head" d="{head}"/>')

    def legend(self, y: float, meanings: dict[str, str]) -> float:
        """Shows what kinds of shapes mean; returns where the next line begins."""
        for kind, meaning in meanings.items():
            self.rect(EDGE, y, 20, 16, kind)
            self.text(EDGE + 30, y + 13, meaning, "quiet", room=INNER - 30)
            y += 24
        return y + 4

    def notes(self, y: float, *lines: str) -> float:
        """Writes lines of quiet text; returns where the next one begins."""
        for line in lines:
            self.text(EDGE, y + 12, line, "quiet")
            y += 21
        return y

    def svg(self, height: float) -> str:
        """The text of the file."""
        size = f'viewBox="0 0 {WIDTH:g} {height:g}"'
        size += f' width="{ZOOM * WIDTH:g}" height="{ZOOM * height:g}"'
        role = f'role="img" aria-labelledby="title desc" font-family={quoteattr(FONT)}'
        paper = f'width="{WIDTH - 1:g}" height="{height - 1:g}" rx="8"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {role}>',
            *self._names,
            f"<style>{_rules(0)}@media (prefers-color-scheme:dark){{{_rules(1)}}}",
            ".line{fill:none;stroke-width:1.5}.strong{font-weight:600}",
            f".code{{font-family:{CODE}}}</style>",
            f'<rect class="paper" x=".5" y=".5" {paper}/>',
        ]
        return "\n".join([*head, *self._parts, "</svg>\n"])


def _rules(is_dark: int) -> str:
    """The colours on light or on dark paper."""
    pairs = {kind: four[2 * is_dark : 2 * is_dark + 2] for kind, four in COLOURS.items()}
    rules = "".join(f".{kind}{{fill:{fill};stroke:{edge}}}" for kind, (fill, edge) in pairs.items())
    # So that a dot is seen, which is too small for its outline.
    rules += "".join(f"circle.{kind}{{fill:{edge}}}" for kind, (_, edge) in pairs.items())
    ink, quiet = INK[is_dark], QUIET[is_dark]
    return f"{rules}text,.head{{fill:{ink}}}.quiet{{fill:{quiet}}}.line{{stroke:{ink}}}"
