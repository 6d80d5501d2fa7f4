"""The page of a comparison."""

import dataclasses
import html
import math

import pytest
import torch

import hmpx
from hmpx.insight.comparing.comparison import Row
from tests.support import browser


@pytest.fixture(scope="module")
def found():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 8, generator=generator),) for _ in range(3)]
    lists = {"opt_level": "O2"}
    return hmpx.compare(browser.hostile_model(), batches, lambda m, x: m(x).exp().mean(), lists=lists, scores=True)


@pytest.fixture
def page(found, tmp_path):
    found.html(tmp_path / "found.html")
    return (tmp_path / "found.html").read_text()


def test_the_table_of_the_page_has_the_rows_and_the_picture_the_names(found, page):
    columns = browser.columns_of(page)
    assert columns["op"] == [row.op for row in found.rows] and len(found.rows) > 2
    assert columns["calls"] == [row.calls for row in found.rows]
    (picture,) = [each for each in browser.shown_in(page)["sections"] if each["kind"] == "bars"]
    assert [row[:2] for row in picture["rows"]] == [[row.op, row.gradient_error] for row in found.by_op()]
    assert browser.shown_in(page)["lines"] == str(found).split("\n\n")[0].split("\n")


def test_the_text_of_the_page_is_that_of_a_terminal_of_110_columns(found, tmp_path, monkeypatch):
    row = Row("exp", where=f"/{'m' * 90}.py:1", module="a." * 40, log_prob_change=0.1)
    wide = dataclasses.replace(found, rows=(row,))
    wide.html(tmp_path / "wide.html")
    monkeypatch.setenv("COLUMNS", "110")
    assert str(wide) in html.unescape((tmp_path / "wide.html").read_text())
    assert max(map(len, str(wide).splitlines()[-2:])) == 110


def test_a_hostile_name_stays_a_name_and_nothing_is_fetched(page):
    assert {*browser.columns_of(page)["module"]} >= {browser.HOSTILE, browser.IMAGE}
    assert browser.is_harmless(page)


def test_the_page_says_inf_and_leaves_out_columns_without_a_value(found, tmp_path):
    rows = (Row("exp", gradient_error=math.inf), Row("add", gradient_error=0.01, note="slow"))
    dataclasses.replace(found, rows=rows).html(tmp_path / "found.html")
    columns = browser.columns_of((tmp_path / "found.html").read_text())
    assert columns["gradient error"] == ["inf", 0.01]
    assert "log-probs" not in columns and "module" not in columns


@pytest.mark.browser
@browser.needed
def test_the_browser_draws_it_and_sorts_it(page, tmp_path):
    dom = browser.drawn(tmp_path, page)
    assert 'data-drawn="yes"' in dom and "<title>hmpx compare</title>" in dom and "<img" not in dom
    by_calls = browser.drawn(tmp_path, page, "document.querySelector('th:nth-child(2) button').click();")
    calls = [float(text) for text in browser.cells(by_calls, "calls")]
    assert calls == sorted(calls, reverse=True) and calls
