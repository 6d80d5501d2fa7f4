"""The pages of record, compare and tune: what they hold, and what a browser draws."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from functools import cache

import pytest
import torch

import hmpx
from hmpx.base import process_state
from hmpx.insight.recording.log import Log
from hmpx.insight.report import about, amount
from hmpx.insight.trials.comparison import Row
from tests.support import browser
from tests.support.recorded import log_of, site

LISTS = {"opt_level": "O2"}


def loss(model, x):
    return model(x).exp().mean()


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=generator),) for _ in range(4)]


def record():
    """Of a line in a file with a hostile name."""
    file = f"/tmp/{browser.IMAGE}/{browser.HOSTILE}.py"
    world: dict = {}
    exec(compile("def call(module, x):\n    return module(x).exp()", file, "exec"), world)
    with hmpx.convert(), hmpx.record() as log:
        world["call"](browser.hostile_model(), torch.ones(2, 8))
    log.unmatched = (f"{browser.IMAGE}.txt:1: {browser.HOSTILE}",)
    return log


def compare():
    return hmpx.compare(browser.hostile_model(), batches()[:3], loss, lists=LISTS, scores=True)


def tune():
    return hmpx.tune(browser.hostile_model(), batches(), loss, progress=False)


ROWS = {record: "sites", compare: "rows", tune: "choices"}  # of the table of a page, by attribute
every = pytest.mark.parametrize("made", [record, compare, tune])
of = cache(lambda made: made())


@pytest.fixture
def saved(tmp_path):
    def save(report):
        report.html(tmp_path / "page.html")
        return (tmp_path / "page.html").read_text()

    return save


@every
def test_the_table_has_every_row_a_hostile_name_stays_a_name_and_nothing_is_fetched(made, saved):
    found, page = of(made), saved(of(made))
    columns, rows = browser.columns_of(page), getattr(found, ROWS[made])
    assert sorted(columns["calls"]) == sorted(row.calls for row in rows) and len(rows) > 2
    cells = "\n".join(str(cell) for column in columns.values() for cell in column)
    named = [name for name in (browser.HOSTILE, browser.IMAGE) if name in cells]
    assert len(named) == 2 or (named and made is tune)  # which has one line for each name
    assert browser.is_harmless(page) and (html.escape(browser.HOSTILE) in page) == (browser.HOSTILE in str(found))
    assert str(found).startswith("\n".join(browser.shown_in(page)["lines"]))


def test_the_picture_of_a_comparison_has_the_names(saved):
    (picture,) = [each for each in browser.shown_in(saved(of(compare)))["sections"] if each["kind"] == "bars"]
    assert [row[:2] for row in picture["rows"]] == [[row.op, row.gradient_error] for row in of(compare).by_op()]


LONG = {
    "record": lambda: log_of(site(module="a.b." * 40)),
    "compare": lambda: dataclasses.replace(
        of(compare), rows=(Row("exp", where=f"/{'m' * 90}.py:1", module="a." * 40, log_prob_change=0.1),)
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_the_text_of_the_page_is_that_of_a_terminal_of_110_columns(name, saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    report = LONG[name]()
    assert str(report) in html.unescape(saved(report)) and max(map(len, str(report).splitlines()[-2:])) == 110


def test_the_table_of_the_page_has_the_numbers_of_the_record(saved):
    sites = [site("exp", nonfinite=3, nonfinite_at=3, casts_avoided=5), site("add", calls=7, shapes=["2x4"])]
    assert browser.columns_of(saved(log_of(*sites))) == {
        **{"op": ["exp", "add"], "line": ["model.py:7"] * 2, "module": ["head"] * 2, "rule": ["bf16"] * 2},
        **{"in -> out": ["fp32 -> bf16"] * 2, "calls": [2, 7], "tensors cast": [4, 4], "avoided": [5, 0]},
        **{"cast MB": [0.0012] * 2, "cast ms": [1.0] * 2, "op ms": [2.0] * 2, "inf, NaN": ["call 3", ""]},
    }


def test_the_page_says_inf_and_leaves_out_columns_without_a_value(saved):
    rows = (Row("exp", gradient_error=math.inf), Row("add", gradient_error=0.01, note="slow"))
    columns = browser.columns_of(saved(dataclasses.replace(of(compare), rows=rows)))
    assert columns["gradient error"] == ["inf", 0.01]
    assert "log-probs" not in columns and "module" not in columns


def test_the_page_of_an_empty_record_says_so_and_has_no_table(saved):
    shown = browser.shown_in(saved(Log()))
    assert "Nothing was converted" in shown["lines"][0] and not shown["sections"]
    page = saved(log_of(unmatched=("mine.txt:3: conv9d",)))
    assert [each["kind"] for each in browser.shown_in(page)["sections"]] == ["box", "text"]


@every
def test_the_head_of_a_page_says_of_what_it_is(made, saved, monkeypatch):
    """In its title, too; a hostile script is text in both."""
    script = f"train.py {browser.IMAGE}"
    monkeypatch.setattr(process_state, "run", {"script": script, "recipe": "bf16-sr, weights=split"})
    if made is record:  # which keeps it from the start
        monkeypatch.setattr(of(made), "about", about())
    page = saved(of(made))
    known = dict(browser.shown_in(page)["about"])
    assert (known["script"], known["recipe"], known["torch"]) == (script, "bf16-sr, weights=split", torch.__version__)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", known["date"]) and known["device"].startswith("CPU ")
    assert f"<title>hmpx {made.__name__}: {html.escape(f'{script}, bf16-sr, weights=split')}</title>" in page
    assert browser.is_harmless(page)


def test_the_head_of_a_page_of_a_saved_record_says_where_the_record_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(process_state, "run", {"script": "report.py", "recipe": "lean"})
    log = log_of(site("exp"), about={"script": "train.py", "torch": "2.9.0", "device": "CPU AVX2"})
    log.json(tmp_path / "log.json")
    Log.load(tmp_path / "log.json").html(tmp_path / "log.html")
    page = (tmp_path / "log.html").read_text()
    assert dict(browser.shown_in(page)["about"]) == {"script": "train.py", "torch": "2.9.0", "device": "CPU AVX2"}
    assert "<title>hmpx record: train.py</title>" in page


def test_no_two_bars_have_the_same_name(saved):
    """An op of one module at two lines, and at one line in two dtypes."""
    sites = [
        site(cast_seconds=1.0, **at) for at in ({}, {"where": "m.py:9"}, {"where": "m.py:9", "given": ("float16",)})
    ]
    (picture,) = [each for each in browser.shown_in(saved(log_of(*sites)))["sections"] if each["kind"] == "bars"]
    names = [name for name, *_ in picture["rows"]]
    assert len({*names}) == len(names) == 3 and picture["unit"] == "ms" and picture["rows"][0][1] == 1000


@pytest.mark.parametrize("value, unit, words", [
    (0.48, "s", "480 ms"), (12.3, "s", "12000 ms"), (0.00123, "s", "1.2 ms"), (1e-6, "s", "0.001 ms"),
    (999, "FLOP", "999 FLOP"), (999.7, "FLOP", "1 kFLOP"), (999.4e6, "FLOP", "999 MFLOP"), (2.5e9, "FLOP", "2.5 GFLOP"),
    (1e12, "FLOP", "1 TFLOP"),
])  # fmt: skip
def test_amounts_in_words(value, unit, words):
    assert amount(value, unit) == words


@pytest.mark.browser
@browser.needed
@every
def test_the_browser_draws_it_and_sorts_it_and_a_hostile_name_runs_nothing(made, saved, tmp_path):
    page = saved(of(made))
    by_calls = "[...document.querySelectorAll('th button')].find(each => each.textContent.includes('calls')).click();"
    open_rows = "for (const row of document.querySelectorAll('tr.row')) row.click();"
    dom = browser.drawn(tmp_path, page, by_calls + open_rows)
    assert 'data-drawn="yes"' in dom and f"<title>hmpx {made.__name__}" in dom and "<img" not in dom
    calls = [float(text) for text in browser.cells(dom, "calls")]
    assert calls == sorted(browser.columns_of(page)["calls"], reverse=True)
    if made is record:
        assert 'class="more" hidden' not in dom and "called as " in dom
        assert html.escape(browser.HOSTILE, quote=False) in dom


def _drawn_box(folder, page, width, of):
    """The boxes of what the script `of` returns, as a window of this width shows it, and the width that it has."""
    boxes = f"[...{of}].map(each => each.getBoundingClientRect().toJSON())"
    script = f"document.title = JSON.stringify([{boxes}, document.documentElement.clientWidth])"
    dom = browser.drawn(folder, page, script, width)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", dom)[1]))


@pytest.mark.browser
@browser.needed
@pytest.mark.parametrize("made, width", [(record, 390), (compare, 390), (tune, 390), (tune, 1280), (compare, 1280)])
def test_the_browser_shows_rule_dtypes_and_reasons_without_scrolling_to_the_side(made, width, saved, tmp_path):
    keys = {record: ("rule", "in -> out"), compare: ("rule", "in -> out"), tune: ("dtype", "why")}[made]
    for key in keys:
        boxes, inside = _drawn_box(
            tmp_path, saved(of(made)), width, f"document.querySelectorAll('td[data-key=\"{key}\"]')"
        )
        assert len(boxes) > 2 and all(each["width"] > 0 and each["right"] <= inside for each in boxes)
        assert inside == width or width < inside <= 500  # which is the narrowest window of some browsers


@pytest.mark.browser
@browser.needed
def test_the_browser_draws_labels_in_a_column_and_ticks_with_their_numbers(saved, tmp_path):
    dom = browser.drawn(tmp_path, saved(of(compare)))
    assert re.search("<dt>(symptom|measured)</dt><dd>the loss is", dom) and "The axis is logarithmic" in dom
    (axis,) = re.findall('<div class="axis faint">(.*?)</div>', dom)
    assert [float(each) for each in re.findall(">([^<]+)</span>", axis)] == [1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 10]
    dom = browser.drawn(tmp_path, saved(log_of(site("exp", cast_seconds=0.0034), site("add", cast_seconds=0.001))))
    (axis,) = re.findall('<div class="axis faint">(.*?)</div>', dom)
    assert re.findall(">([^<]+)</span>", axis) == ["0", "1", "2", "3"]


@pytest.mark.browser
@browser.needed
def test_the_browser_sorts_filters_and_adds_up(saved, tmp_path):
    sites = [site("exp", calls=1200, op_seconds=0.5), site("add", module="blocks.0"), site("relu", op_seconds=0.01)]
    page = saved(log_of(*sites, unmatched=("mine.txt:3: conv9d",)))
    dom = browser.drawn(tmp_path, page)
    assert 'data-drawn="yes"' in dom and "mine.txt:3: conv9d" in dom and dom.count('class="bar"') == 3
    assert browser.cells(dom, "op") == ["exp", "relu", "add"] and browser.cells(dom, "calls") == ["1,200", "2", "2"]
    assert re.findall(r"<td[^>]*>([\d,.]+)</td>", dom.partition("<tfoot>")[2])[:2] == ["1,204", "12"]
    click = "document.querySelectorAll('th button')[{}].click();"
    assert browser.cells(browser.drawn(tmp_path, page, click.format(0)), "op") == ["add", "exp", "relu"]
    assert browser.cells(browser.drawn(tmp_path, page, 2 * click.format(0)), "op") == ["relu", "exp", "add"]
    word = "const i = document.querySelector('input'); i.value = 'bf16 BLOCKS'; i.dispatchEvent(new Event('input'));"
    dom = browser.drawn(tmp_path, page, word)
    assert browser.cells(dom, "op") == ["add"] and "1 of 3 rows" in dom
