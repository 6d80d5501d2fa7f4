"""The plot and the page of a tuning."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import hmpx
from tests.support import browser

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found():
    model = nn.Sequential()
    torch.manual_seed(0)
    for name in (browser.HOSTILE, browser.IMAGE):
        model.add_module(name, nn.Linear(8, 8))
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 8, generator=generator),) for _ in range(4)]
    return hmpx.tune(model, data, lambda m, x: m(x).exp().mean(), objective="coverage", progress=False)


@pytest.fixture
def page(found, tmp_path):
    found.html(tmp_path / "tuned.html")
    return (tmp_path / "tuned.html").read_text()


def test_the_plot_has_every_mark_at_its_place(found, tmp_path):
    found.plot(tmp_path / "tuned.svg")
    drawn = ElementTree.parse(tmp_path / "tuned.svg").getroot()
    marks = [each for each in drawn.iter(f"{SVG}circle") if each.get("class") in ("tuned", "known")]
    assert len(marks) == len(found.marks) == 4
    by_height = sorted(found.marks, key=lambda mark: -mark.gradient_error)
    heights = [float(each.get("cy")) for each in marks]
    assert heights == sorted(heights) and [each.get("class") == "tuned" for each in marks] == [
        mark.name == "tuned" for mark in by_height
    ]
    across = [float(each.get("cx")) for each in marks]
    costs = [mark.cost for mark in by_height]
    assert [a < b for a in across for b in across] == [a < b for a in costs for b in costs]
    words = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {mark.name for mark in found.marks} <= {*words} and "tolerance 0.1" in words


def test_a_hostile_name_stays_a_name_and_nothing_is_fetched(found, page):
    shown = browser.values_in(page)
    assert any(browser.HOSTILE in choice["worst"] or browser.IMAGE in choice["worst"] for choice in shown["choices"])
    assert page.count("<script") == 2 and "<img" not in page and "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert shown["gradient_error"] == found.gradient_error and str(found).splitlines()[0] in page


@pytest.mark.browser
@browser.needed
def test_the_browser_draws_the_choices(found, page, tmp_path):
    dom = browser.drawn(tmp_path, page)
    assert 'data-drawn="yes"' in dom and "<title>hmpx tune</title>" in dom and "<img" not in dom
    table = dom.partition('id="choices"')[2].partition("</table>")[0]
    assert re.findall(r'data-key="name">(\w+)<', table) == [choice.name for choice in found.choices]
