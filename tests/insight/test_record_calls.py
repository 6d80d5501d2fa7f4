"""What `record` writes down of single calls, beside numbers worked out by hand, and what it leaves behind."""

import gc
import threading
import tracemalloc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.base import process_state
from tests.support.recorded import line
from tests.support.untouched import attributes_of_torch

FP32, BF16 = torch.float32, torch.bfloat16


def only(log, op):
    (site,) = [site for site in log.sites if site.op == op]
    return site


def test_calls_casts_and_bytes_are_those_worked_out_by_hand():
    x, w = torch.ones(4, 8), torch.ones(8, 2)

    def model():
        for _ in range(3):
            y = torch.matmul(x, w)  # two casts: (32 + 16) elements, 6 bytes each
        return torch.softmax(y, -1)  # one cast back: 8 elements

    with hmpx.convert(), hmpx.record() as log:
        model()
    matmul, softmax = only(log, "matmul"), only(log, "softmax")
    assert (matmul.where, matmul.entry, matmul.module) == (line(model, 2), "torch.matmul", "")
    assert (matmul.calls, matmul.casts, matmul.casts_avoided, matmul.bytes_cast) == (3, 6, 0, 3 * 48 * 6)
    assert (softmax.calls, softmax.casts, softmax.casts_avoided, softmax.bytes_cast) == (1, 1, 0, 48)
    assert matmul.dtypes == "float32 -> bfloat16" and softmax.dtypes == "bfloat16 -> float32"
    assert matmul.shapes == ["4x8, 8x2"] and softmax.shapes == ["4x2"]
    assert matmul.rule == "bf16" and matmul.reason.startswith("bf16: listed at ") and "bf16.txt:" in matmul.reason
    assert all(site.cast_seconds > 0 and site.op_seconds > 0 for site in log.sites)
    assert log.totals["casts"] == 7 and log.totals["bytes_cast"] == 912
    assert 0 < log.totals["cast_share"] < 1


def test_a_cast_that_was_not_needed_is_counted_as_avoided_and_one_by_hand_has_its_price():
    x = torch.ones(4, 4, dtype=BF16)
    with hmpx.convert(), hmpx.record() as log:
        x @ x
        y = x @ torch.ones(4, 4)
        y.bfloat16(), y.to(BF16), y.float()
        y.to(torch.float16)
    first, second, one, other = log.sites
    assert (first.casts, first.casts_avoided, first.bytes_cast) == (0, 2, 0)
    assert (second.casts, second.casts_avoided, second.bytes_cast) == (1, 1, 96)
    assert (one.op, one.entry, one.reason) == ("to", "Tensor.float", "cast by hand")
    assert (one.casts, one.bytes_cast, one.op_seconds) == (1, 96, 0) and one.cast_seconds > 0
    assert (other.entry, other.dtypes) == ("Tensor.to", "bfloat16 -> float16")


def test_shapes_are_bounded():
    with hmpx.convert(), hmpx.record() as log:
        for n in range(1, 40):
            torch.ones(n, n) @ torch.ones(n, n)
    assert only(log, "matmul").shapes == [f"{n}x{n}, {n}x{n}" for n in range(1, 9)]
    assert only(log, "matmul").calls == 39


@pytest.mark.slow
def test_memory_grows_with_lines_and_not_with_calls():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))

    def many(calls):
        for _ in range(calls):
            model(torch.ones(2, 4))

    with hmpx.convert(), hmpx.record() as log:
        many(1200)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        many(2400)  # of three ops
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert sum(site.calls for site in log.sites) == 10800 and len(log.sites) == 3
    assert grown < 100_000  # of 7200 calls: no object for each


def test_modules_are_named_as_named_modules_names_them():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.exp()

    with hmpx.convert(), hmpx.record() as log:
        Whole()(torch.ones(2, 4))
    assert [(site.op, site.module) for site in log.sites] == [
        ("linear", "layers.0"),
        ("linear", "layers.1.0"),
        ("relu", "layers.1.1"),
        ("exp", "Whole"),
    ]


def codes_of_torch():
    """What each attribute runs: the wrappers of one policy run the same code, whichever conversion made them."""
    return {label: getattr(value, "__code__", value) for label, (value, _) in attributes_of_torch().items()}


def test_off_there_is_nothing_of_it_and_after_it_torch_is_as_it_was():
    before = attributes_of_torch()
    backward = torch.autograd.backward
    with hmpx.record():
        pass
    assert attributes_of_torch() == before and not process_state.in_use()
    with hmpx.convert():
        plain = codes_of_torch()
        with hmpx.record():
            recording = codes_of_torch()
        assert codes_of_torch() == plain != recording
    assert attributes_of_torch() == before and torch.autograd.backward is backward and not process_state.in_use()


def test_restore_within_a_record_leaves_torch_as_it_was():
    before = attributes_of_torch()
    with hmpx.record() as log:
        hmpx.convert()
        torch.ones(2, 2) @ torch.ones(2, 2)
        hmpx.restore()
        assert attributes_of_torch() == before
    assert only(log, "matmul").casts == 2 and "matmul" in log.policy


def test_a_conversion_inside_is_seen_and_so_is_one_around():
    x = torch.ones(2, 2)
    with hmpx.record() as log:
        with hmpx.convert():
            x @ x
        with hmpx.convert("O2"):
            x @ x
            with hmpx.disable_casts():
                x @ x
    assert [site.casts for site in log.sites] == [2, 2, 0]
    assert log.sites[1].reason == "bf16: decided by opt_level O2"
    assert log.sites[2].reason == "left alone: casts are off here" and log.sites[2].rule == ""


def test_what_was_recorded_is_there_after_an_exception_and_an_op_that_raised():
    with hmpx.convert(), pytest.raises(KeyError), hmpx.record() as log:
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        torch.ones(2, 2) @ torch.ones(2, 2)
        raise KeyError
    assert only(log, "matmul").calls == 1 and log.policy and log.about["torch"] == torch.__version__
    with hmpx.record():  # another may be opened
        pass


def test_a_second_record_is_refused():
    with hmpx.record(), pytest.raises(hmpx.HmpxError, match="open already"), hmpx.record():
        pass
    assert not process_state.in_use()


def test_threads_are_all_seen():
    x = torch.ones(4, 4)

    def work():
        for _ in range(200):
            torch.matmul(x, x)

    with hmpx.convert(), hmpx.record() as log:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
    assert only(log, "matmul").calls == 1000 and only(log, "matmul").casts == 2000


def test_vmap_and_grad_are_seen():
    x = torch.ones(3, 4)

    def loss(row):
        return (row @ row).exp().sum()

    expected = torch.func.vmap(torch.func.grad(loss))(x).shape
    with hmpx.convert(), hmpx.record() as log:
        got = torch.func.vmap(torch.func.grad(loss))(x)
    assert got.shape == expected and only(log, "matmul").where == line(loss, 1)
    assert only(log, "matmul").casts == 1 or only(log, "matmul").dtypes.startswith("float32 -> bfloat16")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_ops_are_counted_both_times(reentrant):
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4, requires_grad=True)
    with hmpx.convert(), hmpx.record() as log:
        y = checkpoint(layers, x, use_reentrant=reentrant).float()
        y.sum().backward()
    first, again = (site for site in log.sites if site.op == "linear")
    assert (first.calls, first.casts, again.calls, again.casts) == (1, 3, 1, 3)
    test = test_checkpointed_ops_are_counted_both_times
    assert [first.where, again.where] == [line(test, 4), line(test, 5)]


@hmpx.bf16
def mine(x):
    return x @ x


def scaled(x):
    return x * 2


def test_functions_of_the_user_are_ops(lists):
    """By a decorator, or by their path in a list."""
    name = f"{__name__}.scaled"
    with hmpx.convert(**lists(fp32=name)), hmpx.record() as log:
        scaled(mine(torch.ones(2, 2)))
    one, other = log.sites
    assert one.op.endswith("mine") and (one.casts, one.dtypes) == (1, "float32 -> bfloat16")
    assert "a function of yours" in one.reason
    assert other.op == name and other.dtypes == "bfloat16 -> float32" and not log.unmatched


def test_each_case_of_an_op_that_follows_its_parts_is_a_site(lists):
    """`matmul` of vectors is made of dot, of matrices of mm: lists that name mm alone decide the second."""
    v, m = torch.ones(4), torch.ones(4, 4)
    with hmpx.convert(**lists(bf16="mm")), hmpx.record() as log:
        torch.matmul(v, v)
        torch.matmul(m, m)
    vectors, matrices = log.sites
    assert (vectors.dtypes, matrices.dtypes) == ("float32", "float32 -> bfloat16")
    assert "follows mm" in matrices.reason and not log.unmatched


def test_verbose_beside_it_says_the_same(caplog):
    caplog.set_level("INFO", "hmpx")
    with hmpx.convert(isVerbose=True), hmpx.record() as log:
        torch.ones(2, 2) @ torch.ones(2, 2)
    site = only(log, "matmul")
    assert f"matmul as {site.entry}, bf16: float32, float32 -> bfloat16, bfloat16" in caplog.text
    assert site.where in caplog.text


def test_a_compiled_model_runs_as_it_is_written_and_is_seen():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled = torch.compile(model, backend="eager")
    with hmpx.convert():
        expected = compiled(torch.ones(2, 4))
        with hmpx.record() as log:
            got = compiled(torch.ones(2, 4))
    assert torch.equal(got, expected) and [(site.op, site.module) for site in log.sites] == [
        ("linear", "0"),
        ("gelu", "1"),
    ]


class Broken(torch.optim.SGD):
    def step(self):
        raise KeyError


def test_a_step_is_no_part_of_it_and_is_counted_and_one_that_raises_changes_nothing():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with hmpx.convert(), hmpx.record() as log:
        with pytest.raises(KeyError):
            Broken(model.parameters()).step()
        for _ in range(2):
            model(torch.ones(2, 4)).float().sum().backward()
            optimizer.step()
        torch.ops.aten.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert [site.op for site in log.sites] == ["linear", "to", "sum"] and log.steps == 2
    assert any("mm is in the bf16 list and ran in float32" in said for said in log.escaped)


def test_a_closure_is_watched():
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.LBFGS([w], max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = torch.ops.aten.mm(w, w).sum()
        loss.backward()
        return loss

    with hmpx.convert(), hmpx.record() as log:
        optimizer.step(closure)
    assert any(said.startswith(line(closure, 2)) for said in log.escaped)


def test_names_that_are_gone_say_what_to_use():
    with hmpx.record() as log:
        pass
    for owner, name, use in ((hmpx, "audit", "log.escaped"), (log, "every", "log.sites"), (log, "updates", "doctor")):
        with pytest.raises(AttributeError, match=rf"\.{name} is gone: .*{use}"):
            getattr(owner, name)
