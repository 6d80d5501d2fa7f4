"""Facts about ops that torch does not tell itself. Data only; the rest is read from the installed torch.

REFUSES_MIXED starts from a measurement on CPU: every op of torch's own sample database (`op_db`) with two floating
inputs was called with one of them in BF16, the other in FP32. `tests/ops/test_catalog.py` repeats it and fails if
an op that refuses is missing here. Norms, recurrent ops and others that CPU takes were added by hand, not measured on a
GPU.
"""

from __future__ import annotations

import torch
import torch.functional
import torch.nn.functional as F

from hmpx.base.torch_private import private

# Modules whose attributes are entry points, in the order they are shown.
NAMESPACES = {
    "torch": torch,
    "torch.nn.functional": F,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch._C._nn": private("torch._C._nn"),
    "torch.functional": torch.functional,
}

# A spelling of torch's C side -> the op that lists know. One op, one rule.
RENAMED = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss_nd": "nll_loss",
    "nll_loss2d": "nll_loss",
    "grid_sample": "grid_sampler",
    "log_sigmoid": "logsigmoid",
    "multilabel_margin_loss_forward": "multilabel_margin_loss",
    "_grouped_mm": "grouped_mm",
    "_thnn_fused_lstm_cell": "lstm_cell",
    "_thnn_fused_gru_cell": "gru_cell",
}

# An op that takes another's rule unless a list names it itself: other names of one computation.
FOLLOWS = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat",
    "divide": "div", "fix": "trunc", "ger": "outer", "greater": "gt", "greater_equal": "ge",
    "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne", "subtract": "sub",
    "true_divide": "div", "truediv": "div", "floordiv": "floor_divide", "special_expit": "sigmoid",
    "special_gammaln": "lgamma", "special_psi": "digamma", "special_multigammaln": "mvlgamma",
    "special_gammainc": "igamma", "special_gammaincc": "igammac",
}  # fmt: skip

# C functions without a schema of their own, and the op that they are.
ALIASES = {"spmm": "mm", "dsmm": "mm"}

# The operators of an op. `iadd` and its kin stand for the in-place operator alone, `rsub` for the reflected one. No
# name is made by underscores around another: `__nonzero__` is `bool()`, and `nonzero` an op.
OPERATORS = {
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__",),
    "rsub": ("__rsub__",),
    "mul": ("__mul__", "__rmul__"),
    "truediv": ("__truediv__", "__rtruediv__", "__div__", "__rdiv__"),
    "floordiv": ("__floordiv__", "__rfloordiv__"),
    "remainder": ("__mod__", "__rmod__"),
    "pow": ("__pow__", "__rpow__"),
    "matmul": ("__matmul__", "__rmatmul__"),
    "neg": ("__neg__",),
    "abs": ("__abs__",),
    "eq": ("__eq__",), "ne": ("__ne__",), "lt": ("__lt__",), "le": ("__le__",), "gt": ("__gt__",), "ge": ("__ge__",),
    "iadd": ("__iadd__",),
    "isub": ("__isub__",),
    "imul": ("__imul__",),
    "itruediv": ("__itruediv__", "__idiv__"),
    "ifloordiv": ("__ifloordiv__",),
    "imod": ("__imod__",),
    "ipow": ("__ipow__",),
    "index_put": ("__setitem__",),
}  # fmt: skip
# The operands of an operator that is not binary, and the operators that write to their first one.
OPERANDS = {"__neg__": ("self",), "__abs__": ("self",), "__setitem__": ("self", "index", "value")}
WRITING = frozenset(
    {"__setitem__", *(attribute for name in OPERATORS if name.startswith("i") for attribute in OPERATORS[name])}
)

# Ops that are Python functions of modules that torch itself does not import.
ELSEWHERE = {"flex_attention": "torch.nn.attention.flex_attention"}

# Python functions that share their name with a C function and yet do not always end in it.
NOT_FRONTS = frozenset({"block_diag", "norm", "smooth_l1_loss", "unfold"})

# What a norm writes to, though the schema may not say so, and the pairs whose dtype must be theirs. BF16 input beside
# FP32 weights and statistics runs on CPU and on CUDA; BF16 weights beside FP32 statistics do not run on CPU.
STATISTICS = ("running_mean", "running_var")
BESIDE_STATISTICS = (("weight", "bias"), ("mean", "invstd"))

# Where a call from Python has another default than the schema says: losses leave their elements alone (0), whereas
# `torch.nn.functional` always passes its own.
PYTHON_DEFAULTS = {"reduction": 0}

# Ops that raise when their floating tensor arguments differ in dtype, on some device. Norms are among them because
# CUDA refuses what CPU takes, huber_loss because its backward does, and flex_attention because it runs in the query's
# dtype, silently. `composition.TAKES_MIXED` has the calls of them in which torch takes a mixture.
REFUSES_MIXED = frozenset(
    """
    _convolution addbmm addmm addmv addr baddbmm batch_norm bilinear binary_cross_entropy bmm cdist chain_matmul complex
    cholesky_solve conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution cross
    cross_entropy dot einsum embedding_bag flex_attention grid_sampler grid_sampler_2d grid_sampler_3d group_norm
    grouped_mm gru gru_cell heaviside histogram histogramdd huber_loss inner quantile nanquantile _weight_norm
    index_add index_copy index_put index_reduce instance_norm layer_norm lerp linalg_cross linalg_householder_product
    linalg_ldl_solve linalg_lstsq linalg_lu_solve linalg_matmul linalg_multi_dot linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_tensorsolve linalg_vecdot linear lstm lstm_cell lu_solve masked_scatter matmul mm
    multi_margin_loss mv native_batch_norm native_group_norm native_layer_norm nll_loss ormqr polar prelu put
    rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention scatter scatter_add
    scatter_reduce tensordot triangular_solve vdot
    """.split()
)

# Ops of REFUSES_MIXED that promote in no list: their numbers say where to look, and to round one picks another element;
# or they average, and an average that is rounded stands still (`p.lerp(average, .999)`). So do those in NO_LOW_KERNEL.
PROMOTES = frozenset("grid_sampler grid_sampler_2d grid_sampler_3d histogram histogramdd lerp quantile".split())

# Ops that an FP32 kernel computes sooner than a BF16 one on a CPU without BF16 instructions, rounding of inputs and
# result included. Measured forward and backward with AVX2: products, convolutions and recurrences take 0.02 to 0.5 of
# the native time, attention 0.3. Products with one vector (mv, dot, outer), norms, activations and reductions gain
# nothing.
FP32_KERNELS = frozenset(
    """
    _convolution addbmm addmm baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution einsum gru gru_cell inner linalg_matmul linalg_multi_dot linear lstm
    lstm_cell matmul mm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention tensordot
    """.split()
)

# Ops that an fp8 list may name, and that "bf16-to-fp32" is about (`computing.matrix_products`).
MATRIX_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm")

# Ops of which torch has no BF16 or FP16 kernel on some device, by how their names begin and by name, and functions of
# other modules: where torch refuses such an input, hmpx adds a note to the error. `test_refusals.py` measures it.
NO_LOW_KERNELS = ("fft_", "linalg_", "special_")
NO_LOW_KERNEL = frozenset(
    """
    _upsample_bilinear2d_aa angle avg_pool3d cdist cholesky cholesky_inverse cholesky_solve complex ctc_loss det
    geqrf histc histogram histogramdd igamma igammac inverse logdet lu_solve lu_unpack multi_margin_loss
    multilabel_margin_loss nanquantile norm ormqr pdist pinverse polar polygamma qr quantile slogdet stft svd
    triangular_solve view_as_complex
    """.split()
)
NO_LOW_FUNCTIONS = ("torch.sparse.addmm", "torch.sparse.mm")

# Ops that go wrong on inputs that were rounded before, in whatever dtype they are computed, and the op to use instead:
# a probability of .999 is 1 in BF16, where the loss of the other class is 100 and its gradient 0.
# torch.autocast("cuda") refuses too.
UNSAFE_OF_LOW = {"binary_cross_entropy": "binary_cross_entropy_with_logits"}

# Ops whose kernels for BF16 and FP16 give garbage without an error, in forward or backward: they are computed in FP32
# wherever they are called, and their result has the input's dtype. `tests/ops/test_wrong_in_low.py` looks for more.
WRONG_IN_LOW = frozenset({"matrix_exp", "linalg_matrix_exp"})

# Ops in which Dynamo breaks the graph: they look at values.
BREAK_GRAPHS = frozenset({"corrcoef", "cov"})

# torch's own parametrizations, computed in FP32: those that are modules, and the older hooks.
PARAMETRIZATIONS = (
    "torch.nn.utils.parametrizations._Orthogonal.forward",
    "torch.nn.utils.parametrizations._Orthogonal.right_inverse",
    "torch.nn.utils.parametrizations._SpectralNorm.forward",
    "torch.nn.utils.parametrizations._WeightNorm.forward",  # a norm over the whole weight; torch has the others in FP32
    "torch.nn.utils.spectral_norm.SpectralNorm.compute_weight",
    "torch.nn.utils.weight_norm.WeightNorm.compute_weight",
)

# Names torch has that are conversions or bookkeeping, not ops with a precision.
NOT_OPS = frozenset(
    """
    to type_as copy set_ resize resize_as requires_grad item detach alias data is_floating_point is_complex is_signed
    is_pinned is_set_to is_nonzero is_same_size is_inference is_conj is_neg retain_grad record_stream pin_memory size
    stride numel dim element_size nelement equal allclose isclose can_cast result_type promote_types record
    _scaled_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _cslt_sparse_mm _cslt_sparse_mm_search
    _sparse_semi_structured_addmm _sparse_semi_structured_linear _sparse_semi_structured_mm
    _to_copy _copy_from _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short
    """.split()
)

# Views whose schema does not say so; and a view that takes no BF16, so that a list means a cast before it.
VIEWS = frozenset("atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid".split())
CAST_VIEWS = frozenset({"view_as_complex"})

# Prefixes of ops that make tensors out of shapes alone, or hand their input on.
NOT_COMPUTING = (
    "_", "new_", "empty", "zeros", "ones", "full", "rand", "clone", "contiguous", "detach", "lift", "to_", "sparse_",
    "resize", "reshape", "flatten", "ravel", "is_", "isin", "quantize", "dequantize", "int_repr", "q_", "fbgemm",
    "meshgrid", "broadcast_", "atleast_", "unsafe_", "native_", "cudnn_", "miopen_", "mkldnn_", "bitwise_", "logical_",
    "special_",
)  # fmt: skip

# Ops that O2 runs in BF16: convolutions, linear, and the matrix products.
O2_BF16 = frozenset(
    """
    addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution einsum grouped_mm inner linalg_multi_dot linear matmul mm mv tensordot
    """.split()
)

# Methods of layers that check their input against their weights, (self, input, ...), before they call an op that takes
# the mixture under hmpx; and the attribute that holds the weights.
INPUT_CHECKS = {"torch.nn.RNNBase.check_input": "_flat_weights"}

# Functions that are given another one to be called in backward, and its position: activation checkpointing. It is these
# that every kind of checkpointing ends in, whatever name it was imported by.
CALLED_LATER = {
    "torch.utils.checkpoint._CheckpointFrame.__init__": 1,
    "torch.utils.checkpoint.CheckpointFunction.forward": 1,
}
# Methods of a future that are given a function, to be called when a collective is done, on whatever thread: that of a
# communication hook of DDP is a part of the hook.
CALLED_WHEN_DONE = ("then", "add_done_callback")

# Code that is no model's arithmetic: casts are off inside. A module stands for its functions, a class for its methods
# and the methods of torch's classes that derive from it; "module:name" is one of them. Looked through and left to be
# cast, as they run or are part of a model's forward: torch.func, torch.autograd.functional, torch.distributions,
# torch.export, torch.fx, torch.jit, torch.onnx, torch.utils.checkpoint, of torch.nn.utils the hooks of pruning, of
# weight and spectral norm, parametrizations, `rnn` and `stateless`.
#
# What runs inside a model's forward:
INSIDE_THE_MODEL = (
    # the observers of quantization
    "torch.ao.quantization.observer:ObserverBase",
    # the parts of an op that has been cast already, by tensor parallelism
    "torch.distributed.tensor._redistribute:redistribute_local_tensor",
    "torch.distributed.tensor._dispatch:redistribute_local_tensor",
    "torch.distributed.tensor._api:redistribute_local_tensor",
    "torch.distributed.tensor._tp_conv:tp_convolution", "torch.distributed.tensor._tp_conv:tp_convolution_backward",
    "torch.distributed.tensor.parallel.loss:_log_softmax", "torch.distributed.tensor.parallel.loss:_nll_loss_forward",
    "torch.distributed.tensor.parallel.loss:_nll_loss_and_log_softmax_backward",
    # the parts of flex_attention where no kernel is compiled for it
    "torch._higher_order_ops.flex_attention:FlexAttentionHOP.__call__",
    "torch._higher_order_ops.flex_attention:FlexAttentionBackwardHOP.__call__",
)  # fmt: skip
# What runs outside of it. `updates.step_hooks` watches optimizer steps.
OUTSIDE_THE_MODEL = (
    # learning rates, and averages of weights
    "torch.optim.lr_scheduler", "torch.optim.lr_scheduler:LRScheduler",
    "torch.optim.swa_utils:AveragedModel.update_parameters",
    "torch.distributed.algorithms.model_averaging.utils",
    # loss scales
    "torch.amp.grad_scaler:GradScaler", "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler",
    # initialisation, clipping, and functions that change the weights or the layers of a module
    "torch.nn.init", "torch.nn.utils", "torch.nn.utils.clip_grad", "torch.nn.utils.convert_parameters",
    "torch.nn.utils.fusion", "torch.nn.utils.init", "torch.nn.utils.parametrizations", "torch.nn.utils.parametrize",
    "torch.nn.utils.prune", "torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm",
    # the conversion of a quantized model
    "torch.ao.quantization.quantize", "torch.ao.quantization.utils", "torch.ao.quantization.fuse_modules",
    # data: `__getitem__` of a data set and the collate function, in workers too
    "torch.utils.data._utils.fetch:_BaseDatasetFetcher", "torch.utils.data.dataloader:_BaseDataLoaderIter",
    # weights to which an adapter is added, and those of a new adapter. `import peft` imports all its layers
    "peft:tuners.tuners_utils.BaseTunerLayer.merge", "peft:tuners.tuners_utils.BaseTunerLayer.unmerge",
    "peft:tuners.tuners_utils.BaseTuner.merge_adapter", "peft:tuners.tuners_utils.BaseTuner.unmerge_adapter",
    "peft:tuners.tuners_utils.BaseTuner._unload_and_optionally_merge",
    "peft:tuners.tuners_utils.BaseTuner._pre_injection_hook", "peft:tuners.tuners_utils.BaseTuner.inject_adapter",
    "peft:tuners.lora.LoraModel.add_weighted_adapter",
)  # fmt: skip
IN_THE_MODEL = frozenset({"torch.nn.utils.parametrize.cached"})  # a region, not a call

# Methods by which a program casts a tensor itself.
CASTS_BY_HAND = ("to", "bfloat16", "half", "float", "type", "type_as")

# For a map of dtypes, beside the ops whose schema has a `dtype`. A dtype is asked for; a stated one says how data from
# outside is to be read, and the result has to be mapped; or the one or the other.
DTYPE_ASKED = (
    "torch.Tensor.to", "torch.Tensor.type", "torch.Tensor.new_tensor",
    "torch.set_default_dtype", "torch.set_default_tensor_type",
    "torch.sparse.log_softmax", "torch.sparse.softmax", "torch.sparse.sum",
)  # fmt: skip
DTYPE_FOUND = (
    "torch.Tensor.bincount", "torch.Tensor.view", "torch.asarray", "torch.bincount", "torch.from_dlpack",
    "torch.from_file", "torch.from_numpy", "torch.frombuffer", "torch.utils.dlpack.from_dlpack",
)  # fmt: skip
DTYPE_ASKED_OR_FOUND = ("torch.tensor", "torch.as_tensor")
