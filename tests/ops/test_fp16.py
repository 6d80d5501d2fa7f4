"""FP16 as the low precision of a conversion: whatever BF16 does, with the other dtype."""

import contextlib
import copy
import dataclasses
import itertools
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hmpx
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.lists import read_lists
from hmpx.ops.policies.policy import Rule, build_policy
from hmpx.ops.wrapping import observing
from hmpx.recipes.reading import as_recipe, read_recipe
from hmpx.shell.main import main
from tests.support.autocast_lists import AUTOCAST_LISTS
from tests.support.recorded import escaped
from tests.support.same import same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IN_FP16 = {"low_precision": FP16}


def test_bf16_tensors_beside_fp16_ops_follow_the_lists(lists):
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with hmpx.convert(**lists(bf16="mm", fp32="log_softmax", promote="dot"), **IN_FP16):
        assert torch.equal(torch.mm(x.bfloat16(), y), x.bfloat16().half().mm(y.half()))
        assert x.bfloat16().log_softmax(-1).dtype is FP32
        # Neither holds the other: for the two torch has FP32, in ops that promote by themselves and in others.
        assert torch.dot(x[0].bfloat16(), y[0].half()).dtype is FP32
        assert (x.bfloat16() + y.half()).dtype is torch.promote_types(BF16, FP16) is FP32
        assert torch.bmm(x[None].half(), y[None].bfloat16()).dtype is FP16  # in no list: the first decides
        assert torch.bmm(x[None].bfloat16(), y[None].half()).dtype is BF16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_policy_in_fp16_is_another_one_and_prints_as_itself(level, tmp_path):
    policy, other = build_policy(level, low_precision=FP16), build_policy(level)
    (tmp_path / "policy.yaml").write_text(str(policy))
    assert build_policy(lists=read_lists(tmp_path / "policy.yaml")) == policy != other
    assert "low_precision: float16\n" in str(policy) and "low_precision" not in str(other)
    assert policy.bf16 == other.bf16 and dataclasses.replace(policy, low_precision=BF16) == other
    assert policy.rule(catalog()["linear"]) is Rule.FP16 and other.rule(catalog()["linear"]) is Rule.BF16
    x = torch.randn(3, 3)
    with hmpx.convert(level, **IN_FP16) as handle:
        assert (x @ x).dtype is FP16 and F.log_softmax(x @ x, -1).dtype is FP32 and handle.policy == policy


def test_a_list_file_may_say_it_and_the_caller_outranks_it(tmp_path, lists):
    x, path = torch.randn(3, 3), tmp_path / "mine.yaml"
    for written in ("fp16", "float16", "bf16", "bfloat16"):
        path.write_text(f"bf16: [mm]\nlow_precision: {written}\n")
        meant = BF16 if written.startswith("b") else FP16
        with hmpx.convert(bf16_file_path=path):
            assert x.mm(x).dtype is meant
        other = FP16 if meant is BF16 else BF16
        assert hmpx.convert(bf16_file_path=path, low_precision=other).policy.low_precision is other
    hmpx.restore()
    path.write_text("low_precision: float16\n")  # and the default lists
    with hmpx.convert(bf16_file_path=path):
        assert x.mm(x).dtype is FP16
    assert as_recipe({"bf16_file_path": str(path)}).policy() == build_policy(low_precision=FP16)
    assert as_recipe({"bf16_file_path": str(path), "low_precision": "bf16"}).policy() == build_policy()
    (tmp_path / "other.yaml").write_text("low_precision: bf16\n")
    with pytest.raises(hmpx.OpListError, match=r"mine.yaml and .*other.yaml disagree: low_precision is torch.float16"):
        hmpx.convert(bf16_file_path=path, fp32_file_path=tmp_path / "other.yaml")


def test_explain_takes_it(capsys):
    assert main(["explain", "linear", "--low-precision", "fp16"]) == 0
    assert "rule          fp16: listed at" in capsys.readouterr().out
    assert main(["explain", "linea", "--low-precision", "fp16", "--opt-level", "O2"]) == 0
    assert "linear                             fp16         torch.nn.functional.linear" in capsys.readouterr().out
    assert main(["explain", "hmp-o1", "--low-precision", "fp16"]) == 0
    explained = capsys.readouterr().out
    assert " in FP16, " in explained and "GradScaler" in explained
    with pytest.raises(SystemExit):
        main(["explain", "--low-precision", "fp8"])


@hmpx.fp16
def in_fp16(*tensors):
    return [t.dtype for t in tensors], (tensors[0] @ tensors[0]).dtype


@hmpx.bf16
def in_bf16(x):
    return x.dtype


@pytest.mark.parametrize("low", [BF16, FP16])
def test_a_decorator_says_its_own_dtype(low):
    tensors = torch.randn(3, 3), torch.randn(2).bfloat16(), torch.randn(2).half(), torch.randn(2).double()
    assert in_fp16(*tensors)[0] == [t.dtype for t in tensors]
    with hmpx.convert(low_precision=low):
        assert in_fp16(*tensors) == ([FP16, FP16, FP16, torch.float64], FP16) and in_bf16(tensors[0]) is BF16
        assert (tensors[0] @ tensors[0]).dtype is low
        with hmpx.disable_casts():
            assert in_fp16(*tensors)[0] == [t.dtype for t in tensors]
    with pytest.raises(hmpx.HmpxError, match="is no function"):
        hmpx.fp16(nn.Linear)


def small():
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def _trained(region, steps=8):
    """Scales, losses and weights of a run with loss scaling that overflows at first."""
    torch.manual_seed(0)
    model, seen = small(), []
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with region():
            loss = F.cross_entropy(model(x), torch.arange(16) % 4)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), loss.detach(), [p.detach().clone() for p in model.parameters()]))
    return seen


def test_a_run_with_a_grad_scaler_that_skips_a_step_is_autocasts_to_the_bit():
    expected = _trained(lambda: torch.autocast("cpu", dtype=FP16))
    with hmpx.convert(**AUTOCAST_LISTS, enabled=False, **IN_FP16):
        got = _trained(hmpx.enable_casts)
    with hmpx.convert(**AUTOCAST_LISTS, **IN_FP16):  # around scaler, clipping and step too: they are not the forward
        whole = _trained(contextlib.nullcontext)
    start = [p.detach() for p in (torch.manual_seed(0), small())[1].parameters()]
    weights = [start, *(weights for *_, weights in expected)]
    moved = [not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(weights)]
    scales = [scale for scale, *_ in expected]
    assert not moved[0] and moved[-1] and scales[0] == 2.0**18 and any(b > a for a, b in itertools.pairwise(scales))
    for run in (got, whole):
        for (scale, loss, after), (scale_, loss_, after_) in zip(expected, run, strict=True):
            assert scale == scale_ and torch.equal(loss, loss_) and all(map(torch.equal, after, after_))


def test_the_scale_of_a_loss_is_never_cast(lists):
    """65536 is infinite in FP16, and lists may name the multiplication."""
    scaler, loss = torch.amp.GradScaler("cpu"), torch.tensor(3.0)
    with hmpx.convert(**lists(bf16="mul"), **IN_FP16):
        assert (loss * torch.tensor(65536.0)).isinf()
        for scaled in (scaler.scale(loss), *scaler.scale([loss, loss.half()])):
            assert scaled.dtype is FP32 and scaled == 3 * 65536
    assert torch.amp.GradScaler.scale.__code__.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)


def test_fp16_without_a_scaler_is_said_once(lists, caplog):
    """Not in BF16, not beside an enabled GradScaler, not again in the same conversion."""

    def stepped():
        caplog.clear()
        model = nn.Linear(4, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            F.linear(torch.ones(2, 4), model.weight).float().sum().backward()
            optimizer.step()
        return caplog.text.count("there is no enabled GradScaler")

    before = [*_global_optimizer_pre_hooks]
    with hmpx.convert(**lists(bf16="linear")):
        assert stepped() == 0
    with hmpx.convert(**lists(bf16="linear"), **IN_FP16):
        assert stepped() == 1 and stepped() == 0
    scaler = torch.amp.GradScaler("cpu")
    with hmpx.convert(**lists(bf16="linear"), **IN_FP16):
        assert stepped() == 0 and scaler.is_enabled()
    assert [*_global_optimizer_pre_hooks] == before


@pytest.mark.parametrize(("capable", "said"), [(False, 1), (True, 0)])
def test_bf16_on_a_gpu_without_instructions_for_it_is_said_once(capable, said, lists, caplog, monkeypatch):
    """With a stand-in for what torch says of a T4."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        is_bf16_supported=lambda emulated: capable or emulated,
        get_device_name=lambda: "Tesla T4",
    )
    monkeypatch.setattr(observing, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    optimizer = optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with hmpx.convert(**lists(bf16="linear")):
        optimizer.step()
        optimizer.step()
    assert caplog.text.count("this GPU (Tesla T4) has no instructions for it") == said
    assert caplog.text.count("recipe apex-o1") == said


def test_apex_o1_is_fp16_by_the_lists_that_apex_o1_bf16_has():
    recipe = read_recipe("apex-o1")
    assert dataclasses.replace(recipe, low_precision=None) == read_recipe("apex-o1-bf16")
    assert recipe.low_precision == "float16"


def test_compiled_code_has_the_bits_of_eager_and_sees_other_low_precisions():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for low in (FP16, BF16, FP16):
        with hmpx.convert(low_precision=low):
            assert same([compiled(x)], [layer(x)]) and layer(x).dtype is low
    with hmpx.convert():
        decorated = torch.compile(lambda x: in_fp16(x)[1] is FP16, backend="aot_eager", fullgraph=True)
        assert decorated(torch.randn(3, 3))
    assert compiled(x).dtype is FP32


def test_record_knows_what_escapes_in_fp16(lists):
    x = torch.randn(4, 4)
    with hmpx.convert(**lists(bf16="mm exp"), **IN_FP16):
        assert not escaped(lambda x: (x.mm(x), x.exp()), x)
        (line,) = escaped(torch.ops.aten.exp, x)
        assert "exp is in the fp16 list and ran in float32" in line
        assert len(escaped(torch.ops.aten.exp, x.bfloat16())) == 1 and not escaped(torch.ops.aten.exp, x.half())


NORMS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (4,), w),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b, training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x, torch.zeros(4), torch.ones(4), w, b),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_norms_take_the_mixtures_that_the_cpu_takes_and_cast_the_others(lists):
    x, w, b = torch.randn(2, 4, 4), torch.rand(4), torch.rand(4)
    mixtures = list(itertools.product((FP16, BF16, FP32), repeat=2))
    native = {name: norm(x.half(), w, b) for name, norm in NORMS.items()}  # of the CPU's own: FP16 beside FP32 weights
    wide = {name: norm(x, w, b) for name, norm in NORMS.items()}
    with hmpx.convert(**lists(), **IN_FP16):
        for name, norm in NORMS.items():
            assert same([norm(x.half(), w, b)], [native[name]]) and native[name].dtype is FP16, name
            for first, other in mixtures:
                out = norm(x.to(first), w.to(other), b.to(other))
                assert out.dtype is first
                torch.testing.assert_close(out.float(), wide[name], atol=3e-2, rtol=3e-2)
    with hmpx.convert(**lists(bf16=" ".join(NORMS)), **IN_FP16):
        for norm, (first, other) in itertools.product(NORMS.values(), mixtures):
            assert norm(x.to(first), w.to(other), b.to(other)).dtype is FP16


def test_an_fp16_model_has_fp16_gradients_and_a_plain_step(lists):
    """Stochastic rounding is BF16's: in `disable_casts()`, FP16 parameters get torch's own step."""
    torch.manual_seed(0)
    model = small().half()
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    with hmpx.convert(**lists(bf16="linear", fp32="layer_norm"), **IN_FP16):
        model(x).float().square().sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {FP16}
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        with hmpx.disable_casts():
            optim.SGD(model.parameters(), lr=1e-2).step()
    optim.SGD(plain.parameters(), lr=1e-2).step()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
