"""Faults that were planted in small models: the record names the op, the parameter and the line."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from tests.support.recorded import line

BF16 = torch.bfloat16


def headings(log):
    """What stands beneath the table: heading -> lines."""
    found: dict[str, list[str]] = {}
    for text in str(log).split("\n\n"):
        heading, *lines = text.splitlines()
        found[heading] = [each.strip() for each in lines]
    return found


class Scaled(nn.Module):
    """Linear, a scale in FP32, linear: the scale makes FP32 of the BF16 stream."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = self.first(x)
        y = y * self.scale
        return self.last(y)


@pytest.mark.parametrize("promoted", [False, True], ids=["in no list", "in the promote list"])
def test_a_parameter_in_fp32_that_widens_a_stream(promoted, lists):
    model = nn.Sequential(Scaled(), Scaled())
    with hmpx.convert(**lists(bf16="linear", promote="mul" if promoted else "")), hmpx.record() as log:
        model(torch.ones(4, 8))
    where = line(Scaled.forward, 2)
    assert [(site.op, site.where) for site in log.unchosen] == [("mul", where)] * 2
    assert log.unchosen[1].unchosen == "float32 comes out, as parameter 1.scale in float32 met bfloat16"
    said = headings(log)["In a dtype that nobody chose"]
    assert len(said) == 1 and "parameter *.scale in float32 met bfloat16 (2 times)" in said[0]
    assert said[0].startswith("tests/insight/test_record_faults.py:") or said[0].startswith("test_record_faults.py:")


class Masked(nn.Module):
    """A buffer in FP32 is added in every block: the stream goes up there, and down again in the next product."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x)
        return y + self.mask


def test_a_buffer_in_fp32_that_is_added_in_every_block(lists):
    model = nn.Sequential(*(Masked() for _ in range(3)))
    with hmpx.convert(**lists(bf16="linear")), hmpx.record() as log:
        model(torch.ones(4, 8))
    up, down = line(Masked.forward, 2), line(Masked.forward, 1)
    assert {(trip.first, trip.then, trip.ops, trip.dtypes, trip.listed) for trip in log.round_trips} == {
        (up, down, ("add", "linear"), ("bfloat16", "float32", "bfloat16"), False)
    }
    assert sum(trip.calls for trip in log.round_trips) == 2  # between three blocks
    assert sum(trip.bytes for trip in log.round_trips) == 2 * 32 * 6
    assert [site.module for site in log.unchosen] == ["0", "1", "2"] and "buffer 2.mask" in log.unchosen[2].unchosen
    (said,) = headings(log)["Cast there and back, though no list asks for both"]
    assert "add makes float32 of bfloat16" in said and "linear makes it bfloat16 again (2 times, 384 B)" in said


def test_a_cast_left_in_by_hand_before_an_op_that_casts_up_and_what_is_no_alarm():
    """Logits that are cast up by hand are none, and lists that ask for both casts are told apart."""
    linear = nn.Linear(4, 4)  # as many logits as inputs

    def model(x):
        linear(torch.ones(2, 4)).float()
        torch.softmax(torch.relu(x), -1) @ x
        y = torch.softmax(x, -1)
        y = y.to(torch.bfloat16)
        return torch.log_softmax(y, -1)

    with hmpx.convert(), hmpx.record() as log:
        model(torch.ones(8, 8))
    (trip,) = [trip for trip in log.round_trips if not trip.listed]
    assert (trip.first, trip.then) == (line(model, 4), line(model, 5))
    assert trip.ops == ("to", "log_softmax") and trip.dtypes == ("float32", "bfloat16", "float32")
    assert len(headings(log)["Cast there and back, though no list asks for both"]) == 1


def test_a_round_trip_by_way_of_an_op_that_leaves_the_dtype_alone(lists):
    def model(x, linear):
        y = linear(x) + torch.zeros(8)
        y = F.dropout(torch.relu(y), 0.5)
        return linear(y)

    with hmpx.convert(**lists(bf16="linear")), hmpx.record() as log:
        model(torch.ones(4, 8), nn.Linear(8, 8))
    (trip,) = log.round_trips
    assert (trip.first, trip.then, trip.ops) == (line(model, 1), line(model, 3), ("add", "linear"))


def test_what_the_caller_casts_up_and_down_is_no_alarm():
    """As layers do that compute one op in FP32: norms of language models, and attention's softmax."""

    def model(x):
        y = torch.softmax(x.bfloat16(), -1, dtype=torch.float32).to(torch.bfloat16)
        return y.float().pow(2).to(torch.bfloat16)

    with hmpx.convert(bf16_file_path="", fp32_file_path=""), hmpx.record() as log, hmpx.disable_casts():
        model(torch.ones(4, 8))
    assert len(log.sites) == 6 and not log.round_trips


def test_a_name_that_the_model_never_calls(tmp_path):
    (tmp_path / "mine.txt").write_text("linear\nbmm\n")
    with hmpx.convert(bf16_file_path=tmp_path / "mine.txt"), hmpx.record() as log:
        nn.Linear(4, 4)(torch.ones(2, 4))
    assert log.unmatched == (f"{tmp_path}/mine.txt:2: bmm",)
    assert headings(log)["Names in your lists that no call matched"] == ["mine.txt:2: bmm"]
    assert "softmax" in log.unmatched_of_hmpx
    log.html(tmp_path / "log.html")  # they serve many models, so that a terminal is not told
    said = f"{len(log.unmatched_of_hmpx)} names of the lists that come with hmpx matched no call"
    assert said in (tmp_path / "log.html").read_text() and said not in str(log)


def test_the_first_op_that_is_not_finite_is_named_and_not_what_it_infects():
    def model(x):
        for _ in range(2):  # the second time round everything is infected
            y = x.cos()
            x = torch.exp(y * 100)
            x = F.relu(x) - x
        return x

    with hmpx.convert(), hmpx.record() as log:
        model(torch.zeros(4))
    first = log.first_nonfinite
    assert (first.op, first.where, first.nonfinite) == ("exp", line(model, 3), 1)
    assert [site.op for site in log.sites if site.nonfinite] != ["exp"]
    said, then = headings(log)["First result with an inf or a NaN"]
    assert f":{first.where.rpartition(':')[2]}: exp, in call 1; later in" in said
    assert "python -m hmpx doctor" in then


def test_the_first_in_time_is_named_where_its_site_was_met_later():
    def model(x):
        y = x * 1
        return torch.exp(y)

    with hmpx.convert(), hmpx.record() as log:
        model(torch.zeros(4))
        model(torch.full((4,), 1000.0))
        model(torch.full((4,), float("inf")))
    assert [site.nonfinite for site in log.sites] == [3, 2] and log.first_nonfinite.op == "exp"


def test_its_own_look_at_a_result_is_no_finding(lists):
    """isfinite has `mul` and others for its parts, which lists may name."""
    with hmpx.convert(**lists(bf16="mul abs eq ne")), hmpx.record() as log:
        torch.exp(torch.full((4,), 1000.0))
    assert log.first_nonfinite is not None and not any("ran in" in said for said in log.escaped)


def test_masks_of_minus_infinity_are_no_fault_and_a_row_that_they_cover_is():
    def attended(scores, mask):
        return torch.softmax(scores.masked_fill(mask, -math.inf) + torch.full((4, 4), -math.inf).triu(9), -1)

    mask = torch.eye(4, dtype=torch.bool)
    with hmpx.convert(), hmpx.record() as log:
        attended(torch.randn(4, 4), mask)
        torch.relu(torch.full((8,), 3e38))  # whose sum overflows
    assert log.first_nonfinite is None, str(log)
    mask[2] = True
    with hmpx.convert(), hmpx.record() as log:
        attended(torch.randn(4, 4), mask)
    assert log.first_nonfinite.op == "softmax"
    with hmpx.convert(), hmpx.record() as log:
        (1 - mask.float()) * torch.finfo(torch.float32).min
    assert log.first_nonfinite.op == "mul"
