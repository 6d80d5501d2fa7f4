"""Ops that torch composes in C++ follow their parts, as torch's profiler sees these; and views stay views."""

import contextlib
import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

import hmpx
from hmpx.insight.explain import explain_op
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.policies.composition import ARITHMETIC, COMPOSED
from hmpx.ops.policies.lists import read_lists
from hmpx.ops.policies.policy import Rule, build_policy
from tests.support.recorded import escaped
from tests.support.same import same
from tests.support.samples import database, samples
from tests.support.spanning import spanning

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 3])

# Whose other calls below Python move data, count, check arguments, or run beside a kernel of their own.
BOOKKEEPING = {
    "binary_cross_entropy", "histogram", "histogramdd", "huber_loss", "index_reduce", "isnan", "linalg_matrix_exp",
    "linalg_vander", "masked_select", "max_pool1d", "repeat", "repeat_interleave", "scatter_reduce", "std",
    "take_along_dim", "var",
}  # fmt: skip
BESIDE = {"float_power": "it computes in float64, whatever it is given", "gradient": "its parts are arithmetic"}
MOVEMENT = frozenset(
    """
    _convert_indices_from_coo_to_csr _reshape_copy _to_copy _unsafe_index _unsafe_index_put _unsafe_view _unique
    alias_copy arange argsort broadcast_tensors cat channel_shuffle clone column_stack constant_pad_nd copy diag
    diag_embed diagonal_copy diff empty empty_like empty_strided eye fill flip full full_like gather hstack index
    index_put index_select item linspace masked_select meshgrid new_empty new_full new_ones new_zeros nonzero ones
    ones_like repeat roll scalar_tensor sort stack take tril_indices triu_indices type_as unique_consecutive unique_dim
    unsafe_chunk unsafe_split zeros zeros_like conj_physical _conj_physical native_channel_shuffle tril _pad_circular
    sparse_coo_tensor bernoulli dropout atleast_1d atleast_2d atleast_3d _to_sparse
    _sparse_coo_tensor_with_dims_and_tensors
    """.split()
)


def _schema(name):
    base, _, overload = name.partition(".")
    found = torch._C._jit_get_schemas_for_operator(f"aten::{base}")
    return next((schema for schema in found if schema.overload_name == overload), None)


def _calls(run):
    """What torch's dispatcher saw: each call of an aten op, with its overload and the calls within it."""
    overloads = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    with warnings.catch_warnings(), profile(experimental_config=overloads) as seen:
        warnings.simplefilter("ignore")
        run()

    def name(event):
        return event.name.removeprefix("aten::") + (f".{event.overload_name}" if event.overload_name else "")

    for event in seen.function_events:
        if event.name.startswith("aten::"):
            yield name(event), {name(child) for child in event.cpu_children if child.name.startswith("aten::")}


def _is_writing(schema):
    return schema is None or schema.is_mutable or any(a.is_out for a in schema.arguments)


def _parts(called):
    """Of the calls within an op, those that a list may name and that compute: no views, no writes, no movement."""
    parts = set()
    for name in called:
        schema, base = _schema(name), name.partition(".")[0]
        if _is_writing(schema) or base in MOVEMENT:
            continue
        if any(r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns):
            parts.add(canonical(base))
    return parts


def _attempt(op, sample):
    try:
        return op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return error


@pytest.mark.slow
def test_the_table_holds_what_torch_runs_within_its_ops():
    """Every op of the sample database, watched by the profiler: a part of a listed op that the table lacks fails."""
    found = [(op, sample) for op in database() for sample in samples(op, FP32, 4)]
    missing, checked, ops = {}, set(), catalog()
    for name, called in _calls(lambda: [_attempt(op, sample) for op, sample in found]):
        op = ops.get(canonical(name.partition(".")[0]))
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
        if op is None or _is_writing(_schema(name)) or not composed or op.follows or op.name in {*BOOKKEEPING, *BESIDE}:
            continue
        parts = _parts(called) - {op.name}
        parts = parts - ARITHMETIC or (parts if len(parts) == 1 and len(called) == 1 else set())
        known = {canonical(part) for row in op.rows for way in row.ways for part in way}
        if op.rows:
            checked.add(op.name)
        if parts - known:
            missing.setdefault(op.name, set()).update(parts - known)
    assert not missing
    assert len(checked) > 60


BY_ARGUMENTS = {
    "matmul": [(X[0], X[0]), (X, X[0]), (X[0], X), (X, X), (X[None], X), (X[0], X[None]), (X[None], X[None])],
    "linear": [(X, X), (X, X, X[0]), (X[None], X, X[0]), (X[None].mT, X, X[0]), (X[0], X, X[0])],
    "tensordot": [
        (X, X, [1], [0]), (X, X, [0, 1], [1, 0]), (X[:1], X[:, :1], [1], [0]), (X[0], X, [0], [0]), (X, X, [], []),
    ],
    "linalg_matrix_power": [(X, 3), (X, -1), (X, -3)],
    "cross_entropy": [(X, CLASSES), (X, X.softmax(-1))],
    "pad": [
        *((X[None, None], [1] * 4, mode) for mode in ("reflect", "replicate")),
        *((X[None], [1] * 2, mode) for mode in ("reflect", "replicate")),
        *((torch.ones(1, 1, 3, 3, 3), [1] * 6, mode) for mode in ("reflect", "replicate")),
    ],
    "einsum": [
        ("ij,jk->ik", (X, X)), ("ij,jk", (X, X)), ("i,j", (X[0], X[0])), ("ij,ij->ij", (X, X)), ("i,i", (X[0], X[0])),
        ("ij,jk", (X[:, :1], X[:1])), ("...i,...i", (X, X)), ("...i,...i->i", (X, X)), ("ij,jk,kl", (X, X, X)),
        ("a,b,ab", (X[0], X[0], X)), ("b i d, b j d -> b i j", (X[None], X[None])), ("ii,i", (X, X[0])),
        ("bi,eij->bj", (X, X.expand(2, *X.shape))), ("bi,ij->", (X, X)), ("ij,kj->i", (X[:, :1], X)),
    ],
    "linalg_vecdot": [(X[0], X[0]), (X, X)],
    "cdist": [(X, X, 2.0, 1), (X, X, 1.0)],
}  # fmt: skip
FUNCTIONS = {
    "linear": F.linear, "cross_entropy": F.cross_entropy, "pad": torch._C._nn.pad,
    "linalg_matrix_power": torch.linalg.matrix_power, "linalg_vecdot": torch.linalg.vecdot, "matmul": torch.matmul,
}  # fmt: skip


def test_the_row_that_the_arguments_choose_is_what_runs():
    for name, argument_lists in BY_ARGUMENTS.items():
        function = FUNCTIONS.get(name) or getattr(torch._VF, name)
        aten = "cross_entropy_loss" if name == "cross_entropy" else name
        for arguments in argument_lists:
            called = _calls(functools.partial(function, *arguments))
            ran = next(_parts(inner) for outer, inner in called if outer.split(".")[0] == aten)
            row = next(row for row in COMPOSED[name] if row.when is None or row.when(*arguments))
            way = {part for way in row.ways for part in way}
            assert ran & way and not (ran - way - ARITHMETIC), (name, arguments, ran, way)


FOLLOWING = {
    "bmm": [lambda x: torch.einsum("ij,jk", x, x)],
    "bmm mul": [
        lambda x: torch.einsum("ij,jk,kl->il", x, x, x),
        lambda x: F.bilinear(x, x, x[None]),
    ],
    "mm": [
        lambda x: torch.tensordot(x, x, 1),
        lambda x: x.inner(x),
        lambda x: torch.linalg.multi_dot([x, x, x]),
        lambda x: torch.chain_matmul(x, x),
        lambda x: torch.linalg.matrix_power(x, 2),
        lambda x: x @ x,
        lambda x: F.linear(x, x),
    ],
    "mm mul": [lambda x: x.cov(), lambda x: torch.corrcoef(x)],
    "matmul mm": [
        lambda x: x.matrix_power(3),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
    "addmm": [lambda x: F.linear(x, x, x[0])],
    "_convolution mul": [lambda x: F.conv1d(x[None], x[:, :, None]), lambda x: torch.outer(x[0], x[0])],
    "linear mul": [lambda x: torch.gru_cell(x, x, x.repeat(3, 1), x.repeat(3, 1))],
    "reflection_pad1d": [lambda x: F.pad(x, (1, 1), mode="reflect")],
}


@pytest.mark.parametrize("parts", FOLLOWING)
def test_an_op_in_no_list_follows_its_parts(lists, parts):
    expected = [call(X.bfloat16()) for call in FOLLOWING[parts]]
    with hmpx.convert(**lists(bf16=parts)):
        assert same([call(X) for call in FOLLOWING[parts]], expected)
    assert {each.dtype for each in expected} == {BF16}
    with hmpx.convert(**lists(fp32=parts)):
        assert [call(X.bfloat16()).dtype for call in FOLLOWING[parts]] == [FP32] * len(expected)


@pytest.mark.parametrize(
    "part, calls",
    [
        ("bmm", [lambda: torch.einsum("ij->i", X), lambda: torch.einsum("i,j", X[0], X[0]), lambda: X @ X]),
        ("addmm", [lambda: F.linear(X, X)]),
        ("reflection_pad1d", [lambda: F.pad(X[None, None], (1, 1, 1, 1), mode="reflect"), lambda: F.pad(X, (1, 1))]),
        ("nll_loss", [lambda: F.cross_entropy(X, X.softmax(-1))]),
        ("matmul", [lambda: torch.linalg.matrix_power(X, 1)]),
    ],
)
def test_a_call_that_does_not_run_the_part_stays_as_it_is(lists, part, calls):
    with hmpx.convert(**lists(bf16=part)):
        assert [call().dtype for call in calls] == [FP32] * len(calls)


def test_its_own_listing_outranks_and_mixed_dtypes_meet(lists):
    with hmpx.convert(**lists(bf16="bmm", fp32="einsum")):
        assert torch.einsum("ij,jk", X.bfloat16(), X).dtype is FP32
    with hmpx.convert(**lists(bf16="bmm")):
        assert torch.einsum("ij,jk", X.bfloat16(), X).dtype is BF16
        assert torch.einsum("i,j", X[0].bfloat16(), X[0]).dtype is FP32  # no product: torch takes the mixture


def test_parts_in_different_lists_leave_it_as_it_is_and_record_says_so(lists):
    q = X[None]

    def call(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # which has no fused kernel

    with hmpx.convert(**lists(bf16="matmul", fp32="softmax")) as handle:
        assert call(q).dtype is FP32
        assert {re.search(r":\d+: (\w+)", line)[1] for line in escaped(call, q)} == {"matmul"}
    assert "its parts are in different lists (matmul bf16, softmax fp32)" in explain_op(
        "scaled_dot_product_attention", handle.policy
    )


def test_what_has_no_bf16_kernel_is_not_given_bf16(lists):
    singular = X @ X.mT
    with hmpx.convert(**lists(bf16="matmul")):
        assert torch.equal(torch.linalg.pinv(singular), torch.linalg.pinv(singular.clone()))
        assert torch.linalg.matrix_power(singular, -2).dtype is torch.linalg.pinv(singular).dtype is FP32


def test_explain_names_the_parts(lists):
    policy = build_policy(lists=read_lists(**lists(bf16="bmm mm addmm", fp32="log_softmax nll_loss")))
    assert "bf16: in no list; follows bmm, listed at " in explain_op("einsum", policy)
    assert "bf16.txt:1" in explain_op("einsum", policy)
    assert "fp32: in no list; follows log_softmax, listed at " in explain_op("cross_entropy", policy)
    assert policy.rule(catalog()["cross_entropy"]) is Rule.FP32
    promoted = build_policy(lists=read_lists(**lists(promote="pow")))
    assert "none: in no list; follows pow, listed at " in explain_op("square", promoted)


VIEWS = {
    "t": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "transpose": lambda x: x.transpose(0, 1),
    "reshape": lambda x: x.reshape(-1),
    "contiguous": lambda x: x.contiguous(),
    "chunk": lambda x: x.chunk(2)[0],
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x)[0],
    "meshgrid": lambda x: torch.meshgrid(x[0])[0],
    "atleast_1d": lambda x: torch.atleast_1d(x),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "atleast_3d": lambda x: torch.atleast_3d(x),
}


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
def test_every_view_of_the_catalogue_stays_a_view_in_a_bf16_list(lists):
    """That an op is a view is what its schema says, or a table of the catalogue, whose ops are all called here."""
    views = {name for name, op in catalog().items() if op.view and not name.startswith("_")}
    assert views > VIEWS.keys() > op_facts.VIEWS and len(views) > 50
    with hmpx.convert(**lists(bf16=" ".join(sorted(views)))) as handle:
        for name, view in VIEWS.items():
            x = torch.zeros(4, 4)
            shown = view(x)
            assert shown.dtype is FP32 and shown.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), name
        assert not {patch.op for patch in handle.patched} & views
        assert "only makes a view: never cast, though listed at " in explain_op("t", handle.policy)


def test_a_write_through_a_view_in_the_default_list_arrives():
    weight = torch.zeros(3, 4)
    with hmpx.convert():
        weight.t().copy_(torch.ones(4, 3))
    assert weight.sum() == 12


def _layer(kind, *sizes):
    return lambda: getattr(nn, kind)(*sizes)


class _Einsum(nn.Module):
    def __init__(self, equation, *shapes):
        super().__init__()
        self.equation, self.factors = equation, nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x):
        return torch.einsum(self.equation, x, *self.factors)


class _Bilinear(nn.Bilinear):
    def forward(self, x):
        return super().forward(x, x)


class _Correlated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(7))

    def forward(self, x):
        return self.function(100 + x * self.weight)


class _Flat(nn.Module):
    """A recurrent layer that returns its results in one tuple."""

    def __init__(self, layer, packed=False):
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x):
        results = self.layer(nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2]) if self.packed else x)
        return tuple(each for each in tree_leaves(results) if torch.is_tensor(each) and each.is_floating_point())


JOINED = {
    "gru": (_layer("GRU", 7, 9), (5, 3, 7)),
    "gru of two layers and ways": (lambda: nn.GRU(7, 9, 2, bidirectional=True, batch_first=True), (5, 3, 7)),
    "gru_cell": (_layer("GRUCell", 7, 9), (3, 7)),
    "lstm_cell": (_layer("LSTMCell", 7, 9), (3, 7)),
    "lstm of oneDNN": (lambda: _Flat(nn.LSTM(7, 9)), (5, 3, 7)),
    "lstm of oneDNN, of two layers and ways": (lambda: _Flat(nn.LSTM(7, 9, 2, bidirectional=True)), (5, 3, 7)),
    "lstm that projects its state": (lambda: _Flat(nn.LSTM(7, 9, proj_size=4)), (5, 3, 7)),
    "lstm of packed sequences": (lambda: _Flat(nn.LSTM(7, 9), packed=True), (5, 3, 7)),
    "rnn_tanh of packed sequences": (lambda: _Flat(nn.RNN(7, 9, bidirectional=True), packed=True), (5, 3, 7)),
    "bilinear": (lambda: _Bilinear(7, 7, 6), (3, 7)),
    "cov": (lambda: _Correlated(lambda x: x.cov()), (3, 7)),
    "corrcoef": (lambda: _Correlated(lambda x: torch.corrcoef(x)), (3, 7)),
    "einsum, a chain": (lambda: _Einsum("ij,jk,kl->il", (7, 5), (5, 6)), (3, 7)),
    "einsum, an outer product first": (lambda: _Einsum("a,b,bc->ac", (4,), (4, 5)), (3,)),
    "einsum, a sum of one operand first": (lambda: _Einsum("bi,eij->bj", (4, 7, 5)), (3, 7)),
    "tensordot, a sum of one operand first": (
        lambda: _Correlated(lambda x: torch.tensordot(x, x[:1], ([0], [0]))),
        (3, 7),
    ),
    "einsum, scaled scores": (lambda: _Einsum("bhqd,bhkd,bhk->bhqk", (2, 3, 6, 5), (2, 3, 6)), (2, 3, 4, 5)),
}


def _outcome(make, shape, context, *, grad):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape, requires_grad=grad)
    with context, torch.set_grad_enabled(grad):
        results = model(x)
    results = [*results] if isinstance(results, tuple) else [results]
    if grad:
        sum(each.float().square().sum() for each in results).backward()
        results += [x.grad, *(p.grad for p in model.parameters())]
    return results


class _Rounded(nn.Module):
    """An LSTM of rounded inputs and weights, computed in `dtype`, with its results rounded."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x):
        x, *weights = (t.bfloat16().to(self.dtype) for t in (x, *self.model.parameters()))
        named = dict(zip(dict(self.model.named_parameters()), weights, strict=True))
        return tuple(y.bfloat16() for y in torch.func.functional_call(self.model, named, (x,)))


def _by_torch(name, *, grad):
    """Return what torch.autocast gives. Without BF16 instructions it raises for an LSTM, and torch has one of BF16."""
    make, shape = JOINED[name]
    if name.startswith("lstm of oneDNN") and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _outcome(lambda: _Rounded(make(), BF16), shape, contextlib.nullcontext(), grad=grad)
    return _outcome(make, shape, torch.autocast("cpu", dtype=BF16), grad=grad)


@pytest.mark.parametrize(("name", "grad"), spanning(JOINED, (True, False)))
def test_products_inside_of_an_op_have_the_bits_of_autocast(name, grad):
    """Under autocast's lists the state of a recurrence stays in FP32, in the results and in all gradients."""
    wanted = _by_torch(name, grad=grad)
    found = _outcome(*JOINED[name], hmpx.activate("autocast-cpu"), grad=grad)
    assert same(found, wanted)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["lstm of oneDNN", "cov"])
def test_what_dynamo_leaves_to_python_trains_with_the_bits_of_eager(name):
    """A graph of the op of an LSTM alone would be taken apart, its results in FP32; `cov` looks at values."""
    make, shape = JOINED[name]
    wanted = _by_torch(name, grad=True)
    compiled = functools.partial(torch.compile, backend="aot_eager")
    found = _outcome(lambda: compiled(make()), shape, hmpx.activate("autocast-cpu"), grad=True)
    assert same(found, wanted)


@pytest.mark.parametrize("grad", [True, False])
def test_fp32_kernels_compute_recurrences_whose_products_are_listed(grad):
    """Of two layers and ways too. torch takes all others apart into its own products."""
    lists = {"bf16": ["linear"], "fp32": [], "promote": [], "kernels": "float32"}
    for name in (name for name in JOINED if name.startswith("lstm of oneDNN")):
        make, shape = JOINED[name]
        wanted = _outcome(lambda make=make: _Rounded(make(), FP32), shape, contextlib.nullcontext(), grad=grad)
        assert same(_outcome(make, shape, hmpx.convert(**lists), grad=grad), wanted), name
    names = "lstm that projects its state", "lstm of packed sequences", "rnn_tanh of packed sequences"
    for name in (*names, "lstm_cell", "gru", "gru_cell"):
        assert same(_outcome(*JOINED[name], hmpx.convert(**lists), grad=grad), _by_torch(name, grad=grad)), name


def test_a_constant_sparse_matrix_multiplies_features_as_under_autocast():
    """In each spelling that autocast runs; one that is given FP32 features stays in FP32."""
    links, x = (
        (torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) > 0.6).float().to_sparse(),
        torch.ones(12, 4),
    )
    calls = {
        "A @ h": lambda h: links @ h,
        "A @ v": lambda h: links @ h[:, 0],
        "mm": lambda h: torch.mm(links, h),
        "spmm": lambda h: torch.spmm(links, h),
        "sparse.mm": lambda h: torch.sparse.mm(links, h),
        "A.mm": lambda h: links.mm(h),
        "matmul": lambda h: torch.matmul(links, h),
        "addmm": lambda h: torch.addmm(x, links, h),
        "sparse softmax": lambda h: torch.sparse.softmax(links, 1) @ h,
    }
    layer = nn.Linear(4, 4)

    def features():
        return layer(x)

    wanted = {}
    for name, call in calls.items():
        with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
            wanted[name] = call(features())
    for recipe in ("autocast-cpu", "autocast-cuda", "hmp-o1", "bf16-sr"):
        with hmpx.activate({"extends": recipe, "where": "everywhere"}):
            for name, call in calls.items():
                found = call(features())
                assert found.dtype is BF16 and torch.equal(found, wanted[name]), (name, recipe)
            assert torch.sparse.mm(links, x).dtype is FP32


def test_a_product_that_torch_func_takes_apart_has_the_bits_of_autocast():
    """The product alone is cast, and what is added is not: of all ops under `vmap`, of `linear` under derivatives."""
    vmap, x, signal = torch.func.vmap, torch.randn(4, 16), torch.randn(1, 1, 16)
    w, b, batches = torch.randn(2, 8, 16), torch.randn(2, 8), torch.randn(2, 3, 16, 8)
    calls = {
        "linear": lambda: vmap(lambda w, b: F.linear(x, w, b))(w, b),
        "linear by name": lambda: vmap(lambda w, b: F.linear(bias=b, input=x, weight=w))(w, b),
        "linear of BF16 with an FP32 bias": lambda: vmap(lambda w, b: F.linear(x.bfloat16(), w.bfloat16(), b))(w, b),
        "addmm": lambda: vmap(lambda w, b: torch.addmm(b, x, w.T, beta=0.5, alpha=2.0))(w, b),
        "a method": lambda: vmap(lambda w, b: b.addmm(x, w.T))(w, b),
        "baddbmm": lambda: vmap(lambda w, b: torch.baddbmm(b, x.expand(3, 4, 16), w))(batches, b),
        "addbmm": lambda: vmap(lambda w, b: torch.addbmm(b, x.expand(3, 4, 16), w))(batches, b),
        "conv1d": lambda: vmap(lambda w, b: F.conv1d(signal, w[:, None, :3], b))(w, b),
        "conv_transpose1d": lambda: vmap(lambda w, b: F.conv_transpose1d(w[None], w[:, None, :3], b[:1]))(w, b),
        "nested": lambda: vmap(lambda w, b: vmap(lambda x: F.linear(x, w, b))(x))(w, b),
        "a gradient outside": lambda: torch.func.grad(
            lambda b: vmap(lambda w, b: F.linear(x, w, b))(w, b).float().square().sum()
        )(b),
        "a gradient inside": lambda: vmap(torch.func.grad(lambda b: F.linear(x, w[0], b).float().square().sum()))(b),
        **{
            f"{function.__name__} of {rows.dim()} dimensions": lambda function=function, rows=rows: function(
                lambda x: F.linear(x, w[0], b[0])
            )(rows)
            for function in (torch.func.jacrev, torch.func.jacfwd)
            for rows in (x[0], x, x[None])
        },
        "vjp": lambda: torch.func.vjp(lambda x: F.linear(x, w[0], b[0]), x[0])[0],
        "each row's": lambda: vmap(lambda x: torch.func.vjp(lambda x: F.linear(x, w[0], b[0]), x)[0])(x),
        "none is batched": lambda: vmap(lambda b: F.linear(x, w[0], w[0, :, 0]) + b)(b),
    }
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        wanted = {name: call() for name, call in calls.items()}
    with hmpx.activate({"extends": "autocast-cpu", "where": "everywhere"}):
        for name, call in calls.items():
            assert same([call()], [wanted[name]]), name
    with hmpx.convert(bf16=["linear"], low_precision="float16"):
        assert calls["linear"]().dtype is torch.float32  # FP16 and an FP32 bias
    grad = {"linear": lambda x: F.linear(x, w[0].to(x.device), b[0].to(x.device))}
    grad["addmv"] = lambda x: torch.addmv(b[0].to(x.device), w[0].to(x.device), x[0])  # CPUs' autocast leaves it uncast
    for device in ("cpu", "meta"):  # which has no autocast
        with hmpx.convert(bf16=[*grad], where="everywhere"):
            for name, call in grad.items():
                assert torch.func.vjp(call, x.to(device))[0].dtype is BF16, (name, device)
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is BF16


def test_arithmetic_that_is_listed_too_is_cast_with_its_products(lists):
    """Then the whole op has one precision; its own name decides before all."""
    rules = []
    for bf16 in ("linear", "linear mul", "gru"):
        rules.append(build_policy(lists=read_lists(**lists(bf16=bf16))).rule(catalog()["gru"]))
    assert rules == [Rule.INSIDE, Rule.BF16, Rule.BF16]
