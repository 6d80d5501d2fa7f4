"""The page of a comparison."""

import dataclasses
import html
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.insight.comparing.row import FELT, Row
from tests.support import browser


@pytest.fixture(scope="module")
def found():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 8, generator=generator),) for _ in range(3)]
    return hmpx.compare(browser.hostile_model(), batches, lambda m, x: m(x).exp().mean(), lists={"opt_level": "O2"})


@pytest.fixture
def page(found, tmp_path):
    found.html(tmp_path / "found.html")
    return (tmp_path / "found.html").read_text()


def test_the_table_of_the_page_has_the_numbers_of_the_rows_the_worst_first(found, page):
    worst, columns = found.worst(len(found.rows)), browser.columns_of(page)
    assert columns["op"] == [row.op for row in worst] and len(worst) == len(found.rows) > 2
    for name in ("gradient_error", "loss_change", "error", "accumulated", "calls"):
        assert columns[name.replace("_", " ")] == [getattr(row, name) for row in worst]
    assert browser.shown_in(page)["lines"] == str(found).split("\n\n")[0].split("\n")


def test_the_text_of_the_page_is_that_of_a_terminal_of_110_columns(found, tmp_path, monkeypatch):
    wide = dataclasses.replace(found, rows=(Row("exp", where=f"/{'m' * 90}.py:1", module="a." * 40),))
    wide.html(tmp_path / "wide.html")
    monkeypatch.setenv("COLUMNS", "110")
    assert str(wide) in html.unescape((tmp_path / "wide.html").read_text())
    assert max(map(len, str(wide).splitlines()[-2:])) == 110


def test_of_rows_without_a_loss_the_worst_errs_itself_and_has_not_only_the_errors_of_others(found):
    rows = (Row("passes_on", accumulated=0.5), Row("errs", accumulated=0.1, error=0.1), Row("less", error=0.01))
    assert [row.op for row in dataclasses.replace(found, rows=rows).worst()] == ["errs", "less", "passes_on"]


def test_a_module_of_one_site_has_the_measures_of_the_site(found):
    rows = {row.module: row for row in found.rows if row.op == "linear"}
    of_modules = [row for row in found.by_module() if row.module in rows]
    assert len(of_modules) == 2
    for row in of_modules:
        for name in ("calls", "error", "accumulated"):
            assert getattr(row, name) == pytest.approx(getattr(rows[row.module], name)), name
        assert row.accumulated > 0


def test_what_magnifies_errors_is_the_worst_of_those_that_break_it_alike_but_for_what_is_not_finite(found):
    alone = Row("alone", gradient_error=3.0)
    assert dataclasses.replace(found, rows=(alone,)).worst() == [alone]
    worst, magnifies = Row("worst", gradient_error=3.0, error=1e-3), Row("magnifies", gradient_error=2.0, error=0.9)
    assert dataclasses.replace(found, rows=(worst, magnifies)).worst() == [magnifies, worst]
    worst = dataclasses.replace(worst, phase="backward")
    assert dataclasses.replace(found, rows=(magnifies, worst)).worst() == [worst, magnifies]


def test_a_row_in_words_says_where_it_is_as_far_as_that_is_known():
    effect = "gradient error -, loss change -, error of the op alone 0"
    assert str(Row("exp")) == f"exp: {effect}"
    assert str(Row("exp", "/a/model.py:3", "head")) == f"model.py:3: exp in head: {effect}"


def test_an_estimate_is_marked(found):
    rows = (Row("known", gradient_error=0.05, measured=True), Row("guessed", gradient_error=0.05), Row("none"))
    lines = str(dataclasses.replace(found, rows=rows)).splitlines()
    marked = {row.op: any(" ~" in line for line in lines if row.op in line.split()) for row in rows}
    assert marked == {"known": False, "guessed": True, "none": False}


def test_each_line_is_a_site():
    def loss(model, x):
        x = F.linear(x, model.weight)
        return F.linear(x, model.weight).square().mean()

    found = hmpx.compare(nn.Linear(4, 4), [(torch.randn(2, 4),)], loss, lists={"opt_level": "O2"})
    lines = [int(row.where.rpartition(":")[2]) for row in found.rows if row.op == "linear"]
    assert len(lines) == 2 and abs(lines[0] - lines[1]) == 1


def test_a_row_is_blamed_from_the_error_on_that_a_training_feels():
    assert [Row("exp", gradient_error=e).is_broken for e in (FELT, FELT * 0.999, math.nan)] == [True, False, False]


def test_a_hostile_name_stays_a_name_and_nothing_is_fetched(page):
    assert {*browser.columns_of(page)["module"]} >= {browser.HOSTILE, browser.IMAGE}
    assert browser.is_harmless(page)


def test_the_page_says_inf_and_leaves_out_columns_without_a_value(found, tmp_path):
    rows = (Row("exp", gradient_error=math.inf, measured=True), Row("add", gradient_error=0.01, note="slow"))
    dataclasses.replace(found, rows=rows).html(tmp_path / "found.html")
    columns = browser.columns_of((tmp_path / "found.html").read_text())
    assert columns["gradient error"] == ["inf", 0.01] and columns["by"] == ["", "estimate"]
    assert "log prob change" not in columns and "module" not in columns


@pytest.mark.browser
@browser.needed
def test_the_browser_draws_it_and_sorts_it(page, tmp_path):
    dom = browser.drawn(tmp_path, page)
    assert 'data-drawn="yes"' in dom and "<title>hmpx compare</title>" in dom and "<img" not in dom
    by_error = browser.drawn(tmp_path, page, "document.querySelector('th:nth-child(4) button').click();")
    errors = [float(text) for text in browser.cells(by_error, "error")]
    assert errors == sorted(errors, reverse=True) and len({*errors}) > 1
