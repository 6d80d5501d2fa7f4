"""The page of a tuning."""

import pytest
import torch

import hmpx
from hmpx.insight.tuning.tuned import amount
from tests.support import browser


@pytest.fixture(scope="module")
def found():
    model = browser.hostile_model()
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 8, generator=generator),) for _ in range(4)]
    return hmpx.tune(model, data, lambda m, x: m(x).exp().mean(), progress=False)


@pytest.fixture
def page(found, tmp_path):
    found.html(tmp_path / "tuned.html")
    return (tmp_path / "tuned.html").read_text()


@pytest.mark.parametrize("value, unit, words", [
    (0.48, "s", "480 ms"), (12.3, "s", "12000 ms"), (0.00123, "s", "1.2 ms"), (1e-6, "s", "0.001 ms"),
    (999, "FLOP", "999 FLOP"), (999.7, "FLOP", "1 kFLOP"), (999.4e6, "FLOP", "999 MFLOP"), (2.5e9, "FLOP", "2.5 GFLOP"),
    (1e12, "FLOP", "1 TFLOP"),
])  # fmt: skip
def test_amounts_in_words(value, unit, words):
    assert amount(value, unit) == words


def test_a_hostile_name_stays_a_name_and_nothing_is_fetched(found, page):
    columns = browser.columns_of(page)
    assert columns["name"] == [choice.name for choice in found.choices] and len(columns["name"]) > 2
    assert columns["calls"] == [choice.calls for choice in found.choices]
    assert any(browser.HOSTILE in line or browser.IMAGE in line for line in columns["line"])
    assert browser.is_harmless(page) and str(found).splitlines()[0] == browser.shown_in(page)["lines"][0]


@pytest.mark.browser
@browser.needed
def test_the_browser_draws_the_choices(found, page, tmp_path):
    dom = browser.drawn(tmp_path, page)
    assert 'data-drawn="yes"' in dom and "<title>hmpx tune</title>" in dom and "<img" not in dom
    assert browser.cells(dom, "name") == [choice.name for choice in found.choices]
