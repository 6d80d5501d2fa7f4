"""Norms, recurrent layers, embeddings, encoders and losses under casts, as people call them."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.ops.policies.signatures import read_signature

BF16, FP32 = torch.bfloat16, torch.float32


def tensor(*shape, dtype=FP32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("rule", ["bf16", "fp32", None])
def test_running_statistics_are_updated_where_they_are(lists, rule):
    dtypes = (BF16, FP32, torch.float16)
    cases = itertools.product(dtypes, dtypes, (nn.BatchNorm1d, nn.InstanceNorm1d), (True, False))
    with hmpx.convert(**lists(**{rule: "batch_norm instance_norm"} if rule else {})):
        for stats, given, norm, training in cases:
            layer = norm(3, affine=True, track_running_stats=True).to(stats).train(training)
            mean, variance, x = layer.running_mean, layer.running_var, 2 * tensor(8, 3, 5, dtype=given) + 1
            reference = norm(3, affine=True, track_running_stats=True).train(training)
            with hmpx.disable_casts():
                expected = reference(x.float())
            out = layer(x)
            assert out.dtype is {"bf16": BF16, "fp32": FP32, None: given}[rule]
            assert layer.running_mean is mean and layer.running_var is variance
            assert mean.dtype is variance.dtype is stats
            assert torch.allclose(mean.float(), reference.running_mean, atol=1e-2)
            assert torch.allclose(variance.float(), reference.running_var, rtol=1e-2)
            assert (reference.running_var != 1).all() == training and (reference.running_mean != 0).all() == training
            assert torch.allclose(out.float(), expected, atol=5e-2)


def test_batch_norm_by_keyword(lists):
    arguments = dict(
        weight=None, bias=None, running_mean=torch.zeros(3).bfloat16(), running_var=torch.ones(3).bfloat16()
    )
    rest = dict(training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False)
    with hmpx.convert(**lists(fp32="batch_norm")):
        assert torch.batch_norm(input=tensor(8, 3) + 1, **arguments, **rest).dtype is FP32
        with pytest.raises(TypeError):
            torch.batch_norm()
    assert arguments["running_mean"].any()


@pytest.mark.parametrize("where", ["positions", "keywords"])
def test_an_op_whose_schema_does_not_say_so_writes_to_its_statistics(where, lists):
    x, momentum = 2 * tensor(64, 3) + 1, 0.25
    mean, variance = torch.zeros(3), torch.ones(3)
    with hmpx.convert(**lists(bf16="batch_norm_update_stats")):
        if where == "keywords":
            torch.batch_norm_update_stats(input=x, running_mean=mean, running_var=variance, momentum=momentum)
        else:
            torch.batch_norm_update_stats(x, mean, variance, momentum)
    torch.testing.assert_close(mean, momentum * x.mean(0), rtol=1e-2, atol=0)
    torch.testing.assert_close(variance, (1 - momentum) + momentum * x.var(0), rtol=1e-2, atol=0)


def test_running_statistics_are_found_by_their_names():
    """Those of layers that are synchronized over ranks, and of cuDNN, which no CPU runs."""
    for name, written, same_dtype in (
        ("batch_norm_gather_stats_with_counts", (3, 4), (1, 2)),
        ("batch_norm_gather_stats", (3, 4), (1, 2)),
        ("cudnn_batch_norm", (3, 4), (1, 2)),
        ("native_batch_norm_backward", (), ()),
    ):
        signature = read_signature(name, "input")
        assert (signature.statistics, signature.same_dtype) == (written, same_dtype), name


NORMS = {
    "batch_norm": lambda x, w, b, s: torch.nn.functional.batch_norm(x, *s, w, b, s[0] is None),
    "batch_norm, training": lambda x, w, b, s: torch.nn.functional.batch_norm(x, *s, w, b, True),
    "instance_norm": lambda x, w, b, s: torch.nn.functional.instance_norm(x, *s, w, b, s[0] is None),
    "instance_norm, training": lambda x, w, b, s: torch.nn.functional.instance_norm(x, *s, weight=w, bias=b),
    "group_norm": lambda x, w, b, s: torch.nn.functional.group_norm(x, 2, w, b),
    "layer_norm": lambda x, w, b, s: torch.nn.functional.layer_norm(x.mT, (6,), w, b),
}


@pytest.mark.parametrize("listed", ["default", "bf16", "fp32", "unlisted"])
def test_norms_run_with_or_without_weight_bias_and_statistics(listed, lists):
    """Whatever is missing and of whichever dtypes the rest is; near to FP32, and the bias gets its gradient."""
    x, w, b = tensor(4, 6, 5), tensor(6) + 2, tensor(6)
    names = {"bf16": "batch_norm instance_norm group_norm layer_norm native_batch_norm"}
    kwargs = {"default": {}, "unlisted": lists(), "bf16": lists(**names), "fp32": lists(fp32=names["bf16"])}[listed]

    def arguments(there, given, held, kept):
        own = zip((w, b), there[:2], strict=True)
        weight, bias = (p.to(held, copy=True).requires_grad_() if is_there else None for p, is_there in own)
        mean_and_var = torch.full((6,), 0.5, dtype=kept), torch.full((6,), 2.0, dtype=kept)
        return x.to(given, copy=True).requires_grad_(), weight, bias, mean_and_var if there[2] else (None, None)

    combinations = list(itertools.product(NORMS, itertools.product((True, False), repeat=3)))
    expected = {(norm, there): NORMS[norm](*arguments(there, FP32, FP32, FP32)) for norm, there in combinations}
    with hmpx.convert(**kwargs):
        for (norm, there), dtypes in itertools.product(combinations, itertools.product((FP32, BF16), repeat=3)):
            if not there[2] and dtypes[2] is BF16:
                continue  # without statistics their dtype makes no difference
            own, where = arguments(there, *dtypes), (norm, there, dtypes)
            out = NORMS[norm](*own)
            assert torch.allclose(out.float(), expected[norm, there], atol=0.1, rtol=0.05), where
            if there[1] and (there[0] or norm != "group_norm"):  # torch's own has no backward without a weight
                out.float().sum().backward()
                assert torch.allclose(own[2].grad.float(), torch.full((6,), 20.0)), where
            assert not there[2] or own[3][0].dtype is dtypes[2]


def test_embedding_with_max_norm_renormalises_the_real_weight(lists):
    weight = tensor(5, 4) * 10
    with hmpx.convert(**lists(bf16="embedding embedding_bag")):
        out = F.embedding(torch.tensor([1, 2]), weight, max_norm=1.0)
    assert out.dtype is BF16 and weight.dtype is FP32
    assert (weight[1:3].norm(dim=1) <= 1.001).all() and weight[0].norm() > 1.5


def test_transformer_encoders_are_cast_in_eval_too():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, fast = tensor(2, 3, 8), torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), hmpx.convert():
        assert encoder(x).dtype is encoder(nn.Linear(8, 8)(x)).dtype is BF16
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_modules_with_inplace_write_to_their_input(lists):
    names = "relu leaky_relu dropout dropout2d feature_dropout silu hardtanh"
    with hmpx.convert(**lists(bf16=names)):
        for module in (nn.ReLU, nn.LeakyReLU, nn.Dropout, nn.Dropout2d, nn.SiLU, nn.Hardtanh):
            x = tensor(1, 2, 4, 4)
            assert module(inplace=True)(x) is x and x.dtype is FP32
            assert module()(x).dtype is BF16


_Y = torch.linspace(-2, 2, 12).view(4, 3)
LOSSES = {
    "binary_cross_entropy": (_Y.sigmoid(), _Y.sigmoid()), "binary_cross_entropy_with_logits": (_Y, _Y.sigmoid()),
    "cosine_embedding_loss": (_Y, _Y, torch.ones(4)), "cross_entropy": (_Y, torch.arange(4) % 3),
    "hinge_embedding_loss": (_Y, torch.ones_like(_Y)), "huber_loss": (_Y, _Y), "kl_div": (_Y, _Y), "l1_loss": (_Y, _Y),
    "margin_ranking_loss": (_Y, _Y, torch.ones_like(_Y)), "mse_loss": (_Y, _Y), "smooth_l1_loss": (_Y, _Y),
    "soft_margin_loss": (_Y, torch.ones_like(_Y)), "nll_loss": (_Y, torch.arange(4) % 3),
}  # fmt: skip


def _every_way_to_call(name):
    """By `F`, which says the reduction to torch's own function, and by that function, whose default is another."""
    owners = [owner for owner in (F, torch, torch._C._nn) if hasattr(owner, name)]
    reduced = [functools.partial(getattr(F, name), reduction=r) for r in ("none", "mean", "sum")]
    return [*reduced, *(getattr(owner, name) for owner in owners)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", [None, "fp32", "bf16"])
def test_losses_reduce_as_they_are_told(side, lists):
    def shapes(name, first):
        x, *rest = LOSSES[name]
        return [f(x.to(first), *rest).shape for f in _every_way_to_call(name)]

    expected = {name: shapes(name, FP32) for name in LOSSES}
    with hmpx.convert(**lists(**{side: " ".join(LOSSES)} if side else {})):
        for first in (FP32, BF16):
            assert {name: shapes(name, first) for name in LOSSES} == expected
