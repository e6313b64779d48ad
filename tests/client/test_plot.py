"""The SVG plots of quotes and diagnostics."""

from xml.etree import ElementTree

from sluice.plot import line_plot

SVG = "{http://www.w3.org/2000/svg}"


def points(line):
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def test_each_series_has_a_panel_with_a_caption_and_the_title_repeats_the_captions():
    root = ElementTree.fromstring(line_plot({"loss": [(1, 2.0), (4, -1.0)], "a<b": [(0, 5.0)]}))
    captions = [text.text for text in root.iter(f"{SVG}text")]
    assert captions == ["loss: -1 to 2 over 4 steps", "a<b: 5 to 5 over 0 steps"]
    assert root.find(f"{SVG}title").text == "; ".join(captions)
    (_, top), (last, bottom) = points(next(root.iter(f"{SVG}polyline")))
    width, _ = map(float, root.get("viewBox").split()[2:])
    assert 0 < top < bottom
    assert last == width - 30


def test_the_axis_starts_at_zero_on_request():
    root = ElementTree.fromstring(line_plot({"epsilon": [(1, 1.0), (2, 2.0)]}, from_zero=True))
    assert root.find(f"{SVG}text").text == "epsilon: 0 to 2 over 2 steps"
    (_, half), (_, full) = points(root.find(f"{SVG}polyline"))
    assert (half, full) == (90, 30)
