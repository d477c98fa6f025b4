import re
from xml.etree import ElementTree

from hypothesis import given

from capplan.models.surrogates import Tree, export_svg
from tests.models.surrogates.trees import trees

SVG = "{http://www.w3.org/2000/svg}"


@given(trees(), trees())
def test_a_drawing_has_a_box_with_a_tooltip_for_every_node_and_a_line_for_every_branch(
    one: Tree, two: Tree
) -> None:
    text = export_svg([('one <&> "title"', one), ("two", two)])
    root = ElementTree.fromstring(text)
    nodes = len(one.feature) + len(two.feature)
    boxes = root.findall(f".//{SVG}g")
    assert len(boxes) == nodes
    assert all(box.find(f"{SVG}title").text and box.find(f"{SVG}rect") is not None for box in boxes)
    assert len(root.findall(f".//{SVG}path")) == nodes - 2
    assert 'one <&> "title"' in root.attrib["aria-label"]


@given(trees(most_splits=31))
def test_boxes_lie_inside_the_drawing_and_apart_from_each_other(tree: Tree) -> None:
    root = ElementTree.fromstring(export_svg([("tree", tree)]))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = [
        tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        for rect in root.findall(f".//{SVG}rect")
    ]
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        for other_x, other_y, other_w, other_h in boxes[:i]:
            apart = x >= other_x + other_w or other_x >= x + w or y >= other_y + other_h or other_y >= y + h
            assert apart


@given(trees())
def test_a_drawing_needs_nothing_from_elsewhere(tree: Tree) -> None:
    text = export_svg([("tree", tree)]).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"href|url\(|<script|<style|<image|://", text)
