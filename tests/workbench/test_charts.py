"""Charts are SVG of a few kilobytes that show every value, of curves of any length."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

from jddp.workbench.charts import HEIGHT, MOST_POINTS, WIDTH, Series, Thinned, bar, curves


def drawn(html):
    """The elements of a figure, as XML, and the values for its script."""
    svg = re.search("<svg.*</svg>", html)[0].replace("<svg ", '<svg xmlns="" ')
    return ElementTree.fromstring(svg), json.loads(re.search(r"json\">(.*?)</script>", html)[1])


def places(path):
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path.get("d"))]


def test_a_long_curve_is_thinned_to_points_with_the_range_of_their_values():
    curve = Thinned()
    for step in range(100_000):
        curve.add(step, 100.0 if step == 54_321 else step % 7)
    assert MOST_POINTS / 2 <= len(curve.steps) <= MOST_POINTS
    assert curve.steps[-1] < 99_999
    curve.finish()
    assert curve.steps[-1] == 99_999
    assert (max(curve.high), min(curve.high), {*curve.low}) == (100, 6, {0})
    spike = curve.steps[curve.high.index(100.0)]
    assert 0 <= spike - 54_321 < 100_000 / len(curve.steps) + 2


def test_a_short_curve_is_kept_as_it_is_and_values_that_are_not_finite_are_left_out():
    curve = Thinned()
    for step, value in enumerate([1.0, None, 3, math.nan, math.inf, 10**400, 2.5], 1):
        curve.add(step, value)
    assert (curve.steps, curve.values) == ([1, 3, 7], [1, 3, 2.5])
    assert (curve.smallest, curve.largest) == ((1, 1), (3, 3))


def test_all_points_are_inside_the_drawing_and_larger_values_are_higher():
    html = curves([Series("a", [10, 20, 30], [1, 3, 2]), Series("b", [10, 30], [2.5, 0])], "loss")
    svg, data = drawn(html)
    lines = [places(path) for path in svg.iter("path") if path.get("class") == "line"]
    assert [len(line) for line in lines] == [3, 2]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in lines for x, y in line)
    heights = [y for _, y in lines[0]]
    assert heights[1] < heights[2] < heights[0]
    assert data[0] == {"name": "a", "steps": [10, 20, 30], "values": [1, 3, 2]}


def test_names_cannot_leave_their_place():
    name = '</script><script>alert("&")</script>'
    html = curves([Series(name, [1, 2], [1, 2])], name, name) + bar({name: 1.0}, "s")
    assert html.count("<script") == html.count("</script>") == 1
    assert drawn(html)[1][0]["name"] == name
