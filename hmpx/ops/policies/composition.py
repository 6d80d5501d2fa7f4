"""Ops that torch composes in C++ of other ops: `einsum` of `bmm`, `cross_entropy` of `log_softmax` and `nll_loss`.

A patch in Python does not reach such a part. An op that no list names therefore takes the rule of its parts
(`Policy.cases`). `record` reads the same table the other way round: it asks which ops may have called a part.

A row names the parts that run. Blanks stand between parts that run together, "|" between alternatives of which torch
chooses one by device, size or gradient. An op with several rows takes the first that fits the arguments of the call.
Views and movement of data are left out. Arithmetic (`ARITHMETIC`) beside another part does not decide, since the
precision of a product or a loss does not depend on it. An op of several arithmetic parts alone (`kl_div`) has no row.

The rows come from torch's profiler, run over torch's own samples. `tests/ops/test_composition.py` repeats that, and
fails if a part is missing here.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Composition(NamedTuple):
    """A composed op's parts. `ways`: one tuple of parts for each way to run. `when`: for which arguments; None: all.

    joins: whether the arithmetic beside the products carries a state or multiplies several results. If it is in no
    list, it stays in the dtype of the arguments (`Rule.INSIDE`). A "+" at the head of a row sets this.
    """

    ways: tuple[tuple[str, ...], ...]
    when: Callable[..., bool] | None = None
    joins: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of all ways that decide the rule: arithmetic only if nothing else is there."""
        parts = dict.fromkeys(part for way in self.ways for part in way)
        return tuple(part for part in parts if part not in ARITHMETIC) or tuple(parts)


# Arithmetic by element, reductions and comparisons, with which torch joins the parts of an op.
ARITHMETIC = frozenset(
    """
    abs add all amax amin aminmax any bitwise_and bitwise_not ceil clamp clamp_max clamp_min clip cumprod cumsum div
    eq erf exp floor ge gt isnan isneginf le log log2 logical_not lt masked_fill max maximum mean min minimum mul nansum
    ne neg pow prod reciprocal remainder rsqrt rsub sgn sigmoid sqrt square sub sum tanh true_divide where xlogy
    """.split()
)

# Parts for which torch has no BF16 kernel. Beside a part that a list puts in BF16, they count as listed in FP32.
ONLY_FP32 = frozenset("linalg_eigh linalg_inv linalg_inv_ex linalg_svd linalg_svdvals svd".split())


def _pads(wanted: str, dimensions: int) -> Callable[..., bool]:
    return lambda input, pad, mode="constant", value=None: mode == wanted and len(pad) == 2 * dimensions


def _contracts(equation: str, operands: Any, *, path: Any = None) -> bool:
    """Return whether two operands share a label that is not in the result: only then `einsum` multiplies matrices.

    Dimensions of size 1 do not count: they are multiplied by broadcasting.
    """
    return any(count > 1 for count in _summed(equation, operands).values())


def _is_one_product(equation: str, operands: Any, *, path: Any = None) -> bool:
    """Return whether `einsum` multiplies two matrices, and sums neither of them over a dimension before."""
    counts = _summed(equation, operands).values()
    return len(operands) == 2 and 2 in counts and 1 not in counts


def _summed(equation: str, operands: Sequence[Tensor]) -> Counter[Any]:
    """Return the labels that are not in the result, each with the number of operands that have it."""
    terms, result = einsum_labels(equation, operands)
    held: Counter[Any] = Counter()
    for labels, operand in zip(terms, operands, strict=True):
        held.update({label for label, size in zip(labels, operand.shape, strict=True) if size != 1})
    return Counter({label: count for label, count in held.items() if label not in result})


def einsum_labels(equation: str, operands: Sequence[Tensor]) -> tuple[list[list], list]:
    """Return the label of each dimension of each operand, and those of the result.

    The label of a dimension is its letter. A dimension under ``...`` has a number for its label; the last one has 1.
    """
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "..." + "".join(sorted(letter for letter in {*terms} - {*",."} if terms.count(letter) == 1))
    found, most = [], 0
    for term, operand in zip(terms.split(","), operands, strict=True):
        before, dots, after = term.partition("...")
        hidden = range(operand.dim() - len(before) - len(after), 0, -1) if dots else ()
        found.append([*before, *hidden, *after])
        most = max(most, len(hidden))
    before, dots, after = result.partition("...")
    return found, [*before, *(range(most, 0, -1) if dots else ()), *after]


def _sums_to_one_number(a: Tensor, b: Tensor, dims_self: Any, dims_other: Any) -> bool:
    shared = math.prod(a.shape[d] for d in dims_self), math.prod(b.shape[d] for d in dims_other)
    return (a.numel(), b.numel()) == shared


def _broadcasts(a: Tensor, b: Tensor, dims_self: Any, dims_other: Any) -> bool:
    """Return whether a dimension of size 1 meets a larger one, over which `tensordot` sums before it multiplies."""
    return any(a.shape[i] != b.shape[j] for i, j in zip(dims_self, dims_other, strict=True))


def _runs_as_addmm(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return bias is not None and (input.dim() <= 2 or input.is_contiguous())


def _has_singular_values(input: Tensor, ord: Any = "fro", *rest: Any, **more: Any) -> bool:
    return ord in ("nuc", 2, -2)


def _has_classes_as_targets(input: Tensor, target: Tensor, *rest: Any, **more: Any) -> bool:
    return not target.is_floating_point()


# Rows that the arguments choose. Each condition takes the arguments under the names that torch has for them.
_BY_ARGUMENTS: dict[str, tuple[tuple[str, Callable[..., bool] | None], ...]] = {
    "cdist": (
        ("_cdist_forward", lambda x1, x2, p=2.0, compute_mode=None: p != 2 or "donot" in str(compute_mode)),
        ("_euclidean_dist | _cdist_forward", None),
    ),
    "cross_entropy": (("log_softmax nll_loss", _has_classes_as_targets), ("log_softmax mul", None)),
    "einsum": (
        ("bmm", _is_one_product),
        ("+ bmm mul sum", _contracts),
        ("mul", lambda equation, operands, *, path=None: len(operands) > 1),
    ),
    "inner": (
        ("mul", lambda input, other: input.dim() == 0 or other.dim() == 0),
        ("dot | mul sum", lambda input, other: _sums_to_one_number(input, other, [-1], [-1])),
        ("tensordot", None),
    ),
    "linalg_matrix_norm": (("linalg_svdvals mul", _has_singular_values), ("linalg_vector_norm", None)),
    "linalg_matrix_power": (
        ("matmul", lambda input, n: n > 1),
        ("linalg_inv", lambda input, n: n == -1),
        ("linalg_inv matmul", lambda input, n: n < 0),
    ),
    "linalg_vecdot": (
        ("vdot", lambda input, other, *, dim=-1: input.dim() == other.dim() == 1),
        ("mul sum", None),
    ),
    "linalg_norm": (
        (
            "linalg_matrix_norm",
            lambda input, ord=None, dim=None, *rest, **more: (
                _has_singular_values(input, ord)
                and (input.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)) == 2
            ),
        ),
        ("linalg_vector_norm", None),
    ),
    "linear": (("addmm", _runs_as_addmm), ("matmul", None)),
    "matmul": (
        ("dot", lambda input, other: input.dim() == other.dim() == 1),
        ("mv", lambda input, other: other.dim() == 1 and input.dim() > 1),
        ("mm", lambda input, other: other.dim() == 2),
        ("bmm | mv", lambda input, other: input.dim() == 1),  # torch 2.14 and later choose by sizes
        ("bmm", None),
    ),
    "max": (("maximum", lambda input, other=None, *rest, **more: isinstance(other, Tensor)),),
    "min": (("minimum", lambda input, other=None, *rest, **more: isinstance(other, Tensor)),),
    "pad": tuple(
        (f"{name}_pad{n}d", _pads(mode, n))
        for mode, name in (("reflect", "reflection"), ("replicate", "replication"))
        for n in (1, 2, 3)
    ),
    "tensordot": (("dot | mul sum", _sums_to_one_number), ("+ mm sum", _broadcasts), ("mm", None)),
}

_ALWAYS = {
    # products
    "_euclidean_dist": "matmul mul", "_trilinear": "bmm", "bilinear": "+ _trilinear mul", "chain_matmul": "mm",
    "corrcoef": "+ cov mul", "cov": "+ mm mul", "kron": "mul", "linalg_multi_dot": "mm mul", "outer": "mul",
    "vdot": "dot",
    # convolutions and recurrent layers
    "_convolution_mode": "convolution",
    "slow_conv3d": "slow_conv3d_forward",
    "thnn_conv2d": "_slow_conv2d_forward", "conv1d": "convolution | _convolution_mode",
    "conv2d": "convolution | _convolution_mode", "conv3d": "convolution | _convolution_mode",
    "conv_transpose1d": "convolution", "conv_transpose2d": "convolution", "conv_transpose3d": "convolution",
    "convolution": "_convolution",
    "gru": "+ linear mul | _cudnn_rnn", "gru_cell": "+ linear mul",
    "lstm": "+ mkldnn_rnn_layer | _cudnn_rnn | linear mul", "lstm_cell": "+ linear mul",
    "rnn_relu": "+ linear add | _cudnn_rnn", "rnn_relu_cell": "linear add",
    "rnn_tanh": "+ linear add | _cudnn_rnn", "rnn_tanh_cell": "linear add",
    # attention, softmax and losses
    "_safe_softmax": "softmax", "_scaled_dot_product_attention_math": "matmul _safe_softmax",
    "binary_cross_entropy_with_logits": "logsigmoid mul", "cosine_similarity": "linalg_vector_norm mul",
    "ctc_loss": "_ctc_loss", "dist": "norm", "log_softmax": "_log_softmax", "logcumsumexp": "_logcumsumexp",
    "logsigmoid": "log_sigmoid_forward", "nll_loss": "nll_loss_forward | nll_loss2d_forward",
    "pairwise_distance": "norm sub",
    "_lu_with_info": "linalg_lu_factor_ex", "pdist": "_pdist_forward",
    "scaled_dot_product_attention": """
        _scaled_dot_product_flash_attention_for_cpu | _scaled_dot_product_flash_attention |
        _scaled_dot_product_efficient_attention | _scaled_dot_product_cudnn_attention |
        _scaled_dot_product_attention_math
    """,
    "softmax": "_softmax", "triplet_margin_loss": "pairwise_distance sub",
    # norms and dropout
    "_batch_norm_impl_index": "native_batch_norm | _native_batch_norm_legit | cudnn_batch_norm",
    "_weight_norm": "_weight_norm_interface", "alpha_dropout": "mul",
    "batch_norm": "_batch_norm_impl_index", "dropout": "native_dropout | mul", "feature_alpha_dropout": "mul",
    "feature_dropout": "mul", "group_norm": "native_group_norm", "instance_norm": "batch_norm",
    "layer_norm": "native_layer_norm", "renorm": "linalg_vector_norm", "rms_norm": "_fused_rms_norm",
    # pooling, embeddings, activations
    "adaptive_avg_pool1d": "adaptive_avg_pool2d", "adaptive_avg_pool2d": "_adaptive_avg_pool2d",
    "adaptive_avg_pool3d": "_adaptive_avg_pool3d", "adaptive_max_pool1d": "adaptive_max_pool2d",
    "avg_pool1d": "avg_pool2d", "celu": "elu", "embedding_bag": "_embedding_bag | _embedding_bag_forward_only",
    "grid_sampler": "grid_sampler_2d | grid_sampler_3d", "max_pool1d": "max_pool1d_with_indices",
    "max_pool1d_with_indices": "max_pool2d_with_indices", "max_pool2d": "max_pool2d_with_indices",
    "max_pool3d": "max_pool3d_with_indices", "prelu": "_prelu_kernel", "relu": "clamp_min", "relu6": "hardtanh",
    "selu": "elu",
    # linear algebra
    "cholesky_solve": "_cholesky_solve_helper", "cross": "linalg_cross", "inverse": "linalg_inv",
    "linalg_cholesky": "linalg_cholesky_ex", "linalg_cond": "linalg_svdvals div | linalg_inv_ex linalg_matrix_norm",
    "linalg_det": "_linalg_det", "linalg_eigh": "_linalg_eigh", "linalg_eigvals": "_linalg_eigvals | linalg_eig",
    "linalg_eigvalsh": "_linalg_eigh", "linalg_inv": "linalg_inv_ex", "linalg_ldl_factor": "linalg_ldl_factor_ex",
    "linalg_lu_factor": "linalg_lu_factor_ex", "linalg_matrix_rank": "linalg_svdvals mul | linalg_eigvalsh mul",
    "linalg_pinv": "svd matmul | linalg_eigh matmul",
    "linalg_slogdet": "_linalg_slogdet", "linalg_solve": "linalg_solve_ex", "linalg_solve_ex": "_linalg_solve_ex",
    "linalg_svd": "_linalg_svd", "linalg_svdvals": "_linalg_svd", "linalg_tensorinv": "linalg_inv_ex",
    "linalg_tensorsolve": "linalg_solve", "logdet": "linalg_slogdet log", "lu_solve": "linalg_lu_solve",
    "matrix_exp": "linalg_matrix_exp", "pinverse": "linalg_pinv", "qr": "linalg_qr", "svd": "linalg_svd",
    # Fourier transforms
    **dict.fromkeys(("fft_fft", "fft_ifft"), "_fft_r2c | _fft_c2c"),
    **dict.fromkeys(("fft_fft2", "fft_fftn", "fft_ifft2", "fft_ifftn"), "_fft_c2c"),
    **dict.fromkeys(("fft_hfft", "fft_irfft", "fft_irfft2", "fft_irfftn"), "_fft_c2r"),
    **dict.fromkeys(("fft_hfft2", "fft_hfftn"), "_fft_c2r | _fft_c2c _fft_c2r"),
    **dict.fromkeys(("fft_ihfft", "fft_rfft", "fft_rfft2", "fft_rfftn"), "_fft_r2c"),
    **dict.fromkeys(("fft_ihfft2", "fft_ihfftn"), "_fft_r2c | _fft_r2c _fft_c2c"),
    "stft": "_fft_r2c mul",
    # sorting, differences
    "argsort": "sort", "diff": "sub", "msort": "sort", "nanquantile": "sort", "quantile": "sort", "square": "pow",
    "special_polygamma": "polygamma", "sum_to_size": "sum",
}  # fmt: skip
_BY_ARGUMENTS["matrix_power"] = _BY_ARGUMENTS["linalg_matrix_power"]


def _row(text: str, when: Callable[..., bool] | None = None) -> Composition:
    ways = tuple(tuple(way.split()) for way in text.removeprefix("+").split("|"))
    return Composition(ways, when, text.startswith("+"))


COMPOSED: dict[str, tuple[Composition, ...]] = {
    **{name: (_row(text),) for name, text in _ALWAYS.items()},
    **{name: tuple(_row(*row) for row in rows) for name, rows in _BY_ARGUMENTS.items()},
}


# Ops that may have a sparse gradient, and the calls in which they do. The backward of a cast cannot pass it on.
SPARSE_GRADIENTS: dict[str, Callable[..., bool]] = {
    "embedding": lambda weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False: sparse,
    "embedding_bag": lambda weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, *rest, **more: (
        sparse
    ),
    "gather": lambda input, dim, index, *, sparse_grad=False: sparse_grad,
}


def _is_mixed_on_cpu(*args: Any, **kwargs: Any) -> bool:
    """Return whether the first tensor is BF16 or FP16, the others FP32, and all of them on a CPU."""
    first, *others = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point())
    narrow = first.is_cpu and first.dtype in (torch.bfloat16, torch.float16)
    return narrow and all(t.is_cpu and t.dtype is torch.float32 for t in others)


def _has_wide_mask(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *rest: Any, **more: Any) -> bool:
    return query.is_cpu and query.dtype is key.dtype is value.dtype and attn_mask.dtype is torch.float32


def _has_wide_cell(input: Tensor, hx: Any, *rest: Any, **more: Any) -> bool:
    """Return whether only the cell's state is of another dtype."""
    weights = rest[0] if isinstance(rest[0], (list, tuple)) else (t for t in rest if isinstance(t, Tensor))
    return input.is_cpu and all(t.dtype is input.dtype for t in (hx[0], *weights))


def _asks_for_no_gradient(*args: Any, **kwargs: Any) -> bool:
    tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _has_a_number_for_weight(input: Tensor, end: Tensor, weight: Any) -> bool:
    return input.dtype is end.dtype and (not isinstance(weight, Tensor) or weight.dim() == 0)


# Ops that refuse mixed dtypes (`op_facts.REFUSES_MIXED`), and the calls of them that torch takes. Such a call keeps
# torch's bits. Measured, as REFUSES_MIXED is.
TAKES_MIXED: dict[str, Callable[..., bool]] = {
    "addr": _asks_for_no_gradient,  # their backward refuses
    "huber_loss": _asks_for_no_gradient,
    "cross_entropy": lambda *args, **kwargs: not _has_classes_as_targets(*args, **kwargs),
    "einsum": lambda equation, operands, *, path=None: not _contracts(equation, operands),
    "inner": lambda input, other: input.dim() == 0 or other.dim() == 0,
    "lerp": _has_a_number_for_weight,
    # on a CPU; elsewhere torch refuses. Norms take BF16 or FP16 beside FP32 weights, as torch.autocast leaves them to
    **dict.fromkeys("group_norm layer_norm native_group_norm native_layer_norm".split(), _is_mixed_on_cpu),
    "rms_norm": lambda input, *args, **kwargs: input.is_cpu,
    "scaled_dot_product_attention": _has_wide_mask,
    "lstm": _has_wide_cell,
    "lstm_cell": _has_wide_cell,
}


def accepts(when: Callable[..., bool], args: tuple, kwargs: dict) -> bool:
    """Return whether a condition of this file holds for the arguments of a call."""
    if kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("out", "dtype")}
    try:
        return when(*args, **kwargs)
    except (TypeError, ValueError, AttributeError):  # torch refuses such a call with an error of its own
        return False


@functools.cache
def callers(part: str) -> tuple[str, ...]:
    """Return the ops that may consist of `part` alone, so that a run of `part` may have been a call of them."""
    found = dict.fromkeys(
        name for name, rows in COMPOSED.items() for row in rows if (part,) in row.ways and part not in ARITHMETIC
    )
    return tuple(dict.fromkeys((*found, *(outer for name in found for outer in callers(name)))))
