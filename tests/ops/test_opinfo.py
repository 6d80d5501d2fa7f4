"""PyTorch's own samples of its own ops, run through `convert()`.

With empty lists: the bits and errors of plain torch. With autocast's CPU lists: the dtypes and bits of
`torch.autocast("cpu")`. With one op in a list: what the op gives for inputs that were cast by hand.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import hmpx
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.policies.op_facts import UNSAFE_OF_LOW, WRONG_IN_LOW
from tests.support.samples import database, error_samples, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("everything_is_looked_through"),  # the database holds torch's functions
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SAMPLES = 5
AUTOCAST = Path(hmpx.__file__).parent / "oplists" / "autocast-cpu"

# Their result is memory that nobody wrote, or reads such memory: two plain runs of torch differ as well.
UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.lstsq",
    "torch._scaled_mm", "torch._scaled_mm_v2", "resize_", "resize_as_",
}  # fmt: skip

# Composed in C++ of ops in different lists, an inverse or an svd in FP32 and a product in BF16: it stays as it is.
COMPOSED_IN_CPP = {"linalg.matrix_power", "linalg.pinv"}
# Where autocast itself raises and hmpx casts: a promoted op that meets float16; a nuclear norm, which refuses BF16
# before autocast sees the singular values that it is made of.
AUTOCAST_FAILS = ("at::autocast::prioritize", "linalg.matrix_norm: Low precision dtypes not supported")

# Written in Python out of matrix products. Mixed dtypes that torch refuses in one of them are brought together by the
# first-input rule, and the call fails one op later.
ERROR_MOVES = {"pca_lowrank", "svd_lowrank"}


def name_of(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@functools.cache
def cases():
    """(op, which form, sample), as generated before anything is converted."""
    found = []
    for op in database():
        if op.name in UNDEFINED:
            continue
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu") and dtype not in (torch.float32, torch.bfloat16):
                continue
            made = samples(op, dtype, SAMPLES)
            for form in ("op", "method_variant", "inplace_variant"):
                if getattr(op, form) is not None:
                    found += [(op, form, s) for s in made if not (form[0] == "i" and s.broadcasts_input)]
    return found


def run(op, form, sample):
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps the stack, as text, each time
    random.seed(0)
    copy = functools.partial(tree_map, lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x)
    try:
        return getattr(op, form)(copy(sample.input), *copy(sample.args), **copy(sample.kwargs))
    except Exception as error:
        return error


def right(op, form, sample):
    """What torch gives; of an op whose BF16 and FP16 kernels give garbage, its FP32 result in that dtype."""
    low = sample.input.dtype if isinstance(sample.input, torch.Tensor) else None
    if list_name(op) not in WRONG_IN_LOW or low not in (torch.bfloat16, torch.float16):
        return run(op, form, sample)
    result = run(op, form, type(sample)(sample.input.float(), args=sample.args, kwargs=sample.kwargs))
    return result.to(low) if isinstance(result, torch.Tensor) else result


def bits(x):
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().resolve_conj().reshape(-1)).view(torch.uint8)


def difference(expected, got):
    """None, or in words how two results differ."""
    if isinstance(expected, Exception) or isinstance(got, Exception):
        same = type(expected) is type(got) and str(expected) == str(got)
        return None if same else f"{expected!r:.120} became {got!r:.120}"
    first, second = tree_flatten(expected)[0], tree_flatten(got)[0]
    for a, b in zip(first, second, strict=True):
        if not isinstance(a, torch.Tensor):
            if type(a) is not type(b):
                return f"{type(a)} became {type(b)}"
        elif (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return f"{a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
        elif a.layout is torch.strided and not torch.equal(bits(a), bits(b)):
            nan = a.is_floating_point() and torch.equal(a.isnan(), b.isnan())
            if not (nan and torch.equal(a.nan_to_num(), b.nan_to_num())):
                return "other bits"
    return None


def report(differences):
    return "\n".join(sorted({f"{name}: {text}" for name, text in differences}))


@functools.cache
def results_of_plain_torch():
    return [right(*case) for case in cases()]


def in_autocast(chosen, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return [right(*case) for case in chosen]


@functools.cache
def results_of_autocast():
    return in_autocast(cases(), torch.bfloat16)


def test_empty_lists_give_the_bits_and_the_errors_of_plain_torch(lists):
    expected = results_of_plain_torch()
    with hmpx.convert(**lists()):
        got = [run(*case) for case in cases()]
    differences = [(name_of(op), difference(a, b)) for (op, *_), a, b in zip(cases(), expected, got, strict=True)]
    assert len(differences) > 15_000
    wrong = [(name, text) for name, text in differences if text and name not in ERROR_MOVES]
    assert not wrong, report(wrong)


def check_against_autocast(chosen, expected, low_precision):
    for where in ("everywhere", "model"):
        check_one_against_autocast(chosen, expected, low_precision, where)


class Model(torch.nn.Module):
    """Whatever it is given is a forward. A module without weights would be no model."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, work):
        return work()


def check_one_against_autocast(chosen, expected, low_precision, where):
    arguments = {f"{side}_file_path": AUTOCAST / f"{side}.txt" for side in ("bf16", "fp32", "promote")}
    with hmpx.convert(**arguments, low_precision=low_precision, where=where):
        got = Model()(lambda: [run(*case) for case in chosen])
    wrong = []
    for (op, _, sample), a, b in zip(chosen, expected, got, strict=True):
        if op.name.rpartition(".")[2] in UNSAFE_OF_LOW and sample.input.dtype in (torch.bfloat16, torch.float16):
            assert isinstance(b, hmpx.HmpxError)  # as torch.autocast("cuda"), where "cpu" computes
            continue
        autocast_fails = isinstance(a, RuntimeError) and any(text in str(a) for text in AUTOCAST_FAILS)
        if op.name not in COMPOSED_IN_CPP and not autocast_fails and difference(a, b):
            wrong.append((name_of(op), difference(a, b)))
    assert not wrong, report(wrong)


def test_autocasts_lists_give_the_dtypes_and_bits_of_autocast():
    cases()  # the samples are made once, and not under autocast
    check_against_autocast(cases(), results_of_autocast(), torch.bfloat16)


def test_autocasts_lists_in_fp16_give_the_dtypes_and_bits_of_autocast_in_fp16():
    """Every sample of the ops in which autocast does something to one in BF16; to all others it does nothing."""
    found = zip(cases(), results_of_plain_torch(), results_of_autocast(), strict=True)
    touched = {op.name for (op, *_), plain, cast in found if difference(plain, cast)}
    chosen = [case for case in cases() if case[0].name in touched]
    expected = in_autocast(chosen, torch.float16)
    in_fp16 = sum(isinstance(each, torch.Tensor) and each.dtype is torch.float16 for each in expected)
    assert len(touched) > 100 and in_fp16 > 300
    check_against_autocast(chosen, expected, torch.float16)


def test_error_samples_give_torchs_own_errors(lists):
    def attempt(op, sample):
        try:
            return op(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:
            return error

    found = [(op, e.sample_input) for op in database() for e in error_samples(op)]
    expected = [attempt(op, sample) for op, sample in found]
    with hmpx.convert(**lists()):
        got = [attempt(op, sample) for op, sample in found]
    wrong = [
        (op.name, difference(a, b))
        for (op, _), a, b in zip(found, expected, got, strict=True)
        if isinstance(a, Exception) and difference(a, b)
    ]
    # Their samples mix dtypes and sizes: the first-input rule cures the one, torch then complains of the other.
    assert len(found) > 500 and {name for name, _ in wrong} == {"dot", "vdot"}, report(wrong)


def list_name(op):
    return canonical(op.name.removeprefix("nn.functional.").replace(".", "_"))


def by_hand(value):
    eligible = isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.layout is torch.strided
    return value.bfloat16() if eligible else value


def cast_by_hand(sample):
    return type(sample)(
        tree_map(by_hand, sample.input), args=tree_map(by_hand, sample.args), kwargs=tree_map(by_hand, sample.kwargs)
    )


# Not comparable by hand-cast inputs, with the reason.
OTHERWISE = {
    "batch_norm": "its statistics are not cast", "instance_norm": "its statistics are not cast",
    "embedding": "max_norm renormalises the FP32 weight before the cast",
    "embedding_bag": "max_norm renormalises the FP32 weight before the cast",
    "max_pool1d": "return_indices=True is another op, max_pool1d_with_indices",
    "max_pool2d": "return_indices=True is another op, max_pool2d_with_indices",
    "max_pool3d": "return_indices=True is another op, max_pool3d_with_indices",
    "normal": "its database entry is the in-place method", "cov": "its database entry squeezes by another op",
}  # fmt: skip


def test_an_op_alone_in_the_bf16_list_equals_inputs_cast_by_hand(lists):
    """For every op that has samples and computes: no front in torch's Python passes the patch by."""
    ops, wrong, checked = catalog(), [], set()
    grouped: dict[str, list] = {}
    for case in cases():
        name = list_name(case[0])
        first = tree_flatten((case[2].input, case[2].args, case[2].kwargs))[0]
        floats = [x.dtype for x in first if isinstance(x, torch.Tensor) and x.is_floating_point()]
        explicit = any(case[2].kwargs.get(k) is not None for k in ("dtype", "out")) or torch.dtype in map(type, first)
        computes = name in ops and ops[name].computes and name not in OTHERWISE
        if computes and torch.float32 in floats and not explicit and case[1] != "inplace_variant":
            grouped.setdefault(name, []).append(case)
    expected = {name: [right(op, form, cast_by_hand(s)) for op, form, s in group] for name, group in grouped.items()}

    def differing(name):
        for (op, form, s), reference in zip(grouped[name], expected[name], strict=True):
            if not isinstance(reference, Exception):
                checked.add(name)
                if text := difference(reference, run(op, form, s)):
                    yield f"{name} as {name_of(op)} {form}", text

    with hmpx.convert(**lists(bf16=" ".join(grouped))):
        suspects = [name for name in grouped if list(differing(name))]
    for name in suspects:  # a sample may be a function of several ops: then only the op alone is comparable
        with hmpx.convert(**lists(bf16=name)):
            wrong += differing(name)
    assert len(checked) > 250
    assert not wrong, report(wrong)
