"""Every name of torch that hmpx uses and torch does not document, by the feature of hmpx that needs it.

This is the list to go through when a new version of torch is out: `python -m hmpx check --torch` says what of it the
installed one lacks. Code elsewhere gets these names from `private`, or asks a feature whether it is on, or, of
attributes of torch's objects, uses them as they stand here. Importing hmpx, eager `convert`, `attach` and
`disable_casts` need none of them.

Names without an underscore are listed where they stand in a private module, or have no words in torch's documentation.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from hmpx.base.torch_features import Feature, Name, exists
from hmpx.base.torch_stand_ins import ByName, Guards, has_avx512, hooked, leaves, map_only, map_tree, on_each, schemas


class _NoMode:
    def __init__(self) -> None:
        DISPATCH.require()


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer()"
_CTX = "torch._dynamo.variables.ctx_manager"
_TRACER = "torch._dynamo.symbolic_convert.InstructionTranslatorBase()"
_GRAPH = "torch._dynamo.output_graph.OutputGraph"
_FRAME = "torch._dynamo.eval_frame"
_DTENSOR = "torch.distributed.tensor"
_NO_COUNTS: Any = collections.defaultdict(collections.Counter)
_TREES = "leaves", "map", "map_only"
_writes = itertools.count()
_GRAPH_TASK = Name(
    "torch._C._current_graph_task_id", "tells one backward pass from the next, and from a forward", off=lambda: -1
)
_QUEUE = Name("torch.autograd.Variable._execution_engine.queue_callback", "runs when a backward pass is done")
_FUNC = Name("torch._C._functorch.peek_interpreter_stack", "whether torch.func runs", off=lambda: True)
_DISPATCH = Name("torch._C._len_torch_dispatch_stack", "whether a dispatch mode looks on", off=lambda: 1)
_WRITTEN = property(lambda _: next(_writes))  # each look finds a write
_MARK = Name("torch._dynamo.decorators:_dynamo_marked_constant", "marks a function that is called while it traces")

# Op lists

OPS = Feature(
    "op lists",
    "nothing is lost",
    Name("torch._C._nn", "C functions of torch.nn.functional are entry points of their own", F),
    Name("torch._C._VariableFunctions", "names every C function of torch", torch),
    Name("torch._C._jit_get_schemas_for_operator", "which arguments of an op are tensors, views, defaults", schemas),
    Name("torch.utils._device._device_constructors", "functions that take the device of a `with`", lambda: None),
    Name("torch._linalg_utils", "the module of functions that torch has removed: a list may still name them", None),
    Name("torch._C._DisableTorchDispatch", "what hmpx computes itself is seen by no mode", contextlib.nullcontext),
    Name("torch._C.is_autocast_enabled", "torch's own answer", torch.is_autocast_enabled),
    Name("torch._C.get_autocast_dtype", "the same", torch.get_autocast_dtype),
    Name("torch._C.set_autocast_enabled", "the same, and no region of hmpx", torch.set_autocast_enabled),
    Name("torch._C.set_autocast_dtype", "the same", torch.set_autocast_dtype),
    Name("torch.ops.mkldnn._is_mkldnn_bf16_supported", "whether the CPU has instructions for BF16", has_avx512),
    Name("torch.ops.mkldnn._is_mkldnn_fp16_supported", "the same for FP16", has_avx512),
    Name("torch.nn.Module._wrapped_call_impl", "the call of a module, with a region in one frame; else in two", None),
    Name("torch.nn.Module._compiled_call_impl", "one of its two ways on", None),
    Name("torch.nn.Module._call_impl", "the other one", None),
    Name("torch.nn.parallel.replicate:_former_parameters", "those of a replica of DataParallel", None),
    Name("torch._subclasses.FakeTensor", "a compiler's tensor, without memory", ByName("FakeTensor", (), {})),
    Name("torch._subclasses.functional_tensor.FunctionalTensor", "the same", ByName("FunctionalTensor", (), {})),
    *(
        Name(f"torch.{name}", "spells ops out in other ops, or counts on their dtypes: not cast, not mapped", None)
        for name in (
            *("_decomp", "_functorch", "_higher_order_ops", "_inductor", "_library", "_meta_registrations", "_prims"),
            *("_prims_common", "_refs", "_subclasses", "_tensor_str", "_utils", "fx.experimental"),
        )
    ),
)
HOOKS = Feature(
    "hooks of gradients beside the model",
    "ops in them are cast as a model's, and ops in the backward of a torch.autograd.Function as they come",
    Name("torch.autograd._engine_run_backward", "where a backward pass begins; else torch.autograd.backward", None),
    _GRAPH_TASK,
    Name("torch._C._current_autograd_node", "tells a function's backward from a hook", off=lambda: None),
)
RECURRENT = Feature(
    "casts of recurrent layers",
    "they run in the dtype of their weights, and refuse inputs of another one",
    Name("torch._VF", "RNN layers call torch's C functions by it"),
    Name("torch.nn.RNNBase.check_input", "compares the dtypes of input and weights: it sees the input cast"),
    Name("torch.nn.RNNBase()._flat_weights", "the weights"),
)
CHECKPOINTING = Feature(
    "activation checkpointing in the region of its forward",
    "what is computed again in backward may be cast otherwise than in the forward",
    Name("torch.utils.checkpoint._CheckpointFrame.__init__", "keeps a function for backward"),
    Name("torch.utils.checkpoint.CheckpointFunction.forward", "the same"),
)
PARAMETRIZATIONS = Feature(
    "parametrizations in FP32",
    "those of BF16 weights are computed in BF16",
    Name("torch.nn.utils.parametrizations._Orthogonal.forward", "is computed in FP32"),
    Name("torch.nn.utils.parametrizations._SpectralNorm.forward", "the same"),
    Name("torch.nn.utils.parametrizations._WeightNorm.forward", "the same"),
    Name("torch.nn.utils.spectral_norm.SpectralNorm.compute_weight", "the same"),
    Name("torch.nn.utils.weight_norm.WeightNorm.compute_weight", "the same"),
    Name("torch.nn.Module()._parameters", "is given FP32 weights meanwhile"),
    Name("torch.nn.Module()._buffers", "the same; and what a record of a run puts back"),
)
DATA = Feature(
    "data loading beside the model",
    'convert(where="everywhere") casts in data sets and collate functions',
    Name("torch.utils.data._utils.fetch._BaseDatasetFetcher", "no model's forward, in workers too"),
    Name("torch.utils.data.dataloader._BaseDataLoaderIter", "the same, in the main process"),
)
LOADED = Feature(
    "dtypes of modules that torch.load has read",
    "a dtype_map leaves them as they are",
    Name("torch.nn.Module._apply", "maps them"),
)
AUTOCAST = Feature(
    "regions of torch.autocast in models",
    "op lists cast in torch.autocast(enabled=False) too, and torch.autocast(enabled=True) casts after them",
    Name("torch.autocast()._enabled", "whether a region was to cast"),
    Name("torch.autocast().fast_dtype", "and to which dtype"),
    Name("torch.autocast().device", "and on which device"),
    Name("torch.autocast().prev", "what its exit sets again"),
)
TENSOR_PARALLEL = Feature(
    "tensor parallelism under op lists",
    "nothing is lost: parts of an op that has been cast are left alone, where they have these names",
    *(
        Name(f"{_DTENSOR}.{name}", "a part of an op that has been cast", None)
        for name in (
            *("_redistribute.redistribute_local_tensor", "_dispatch.redistribute_local_tensor"),
            *("_api.redistribute_local_tensor", "_tp_conv.tp_convolution", "_tp_conv.tp_convolution_backward"),
            *("parallel.loss._log_softmax", "parallel.loss._nll_loss_forward"),
            "parallel.loss._nll_loss_and_log_softmax_backward",
        )
    ),
    Name("torch._higher_order_ops.flex_attention.FlexAttentionHOP.__call__", "the same, of flex_attention", None),
    Name("torch._higher_order_ops.flex_attention.FlexAttentionBackwardHOP.__call__", "the same", None),
)
KEPT_CASTS = Feature(
    "cached_weights()",
    "it keeps no casts",
    Name("torch.Tensor._version", "whether a weight is as it was", off=_WRITTEN),
    Name("torch._C._storage_Use_Count", "a weight whose storage something else holds is not kept"),
    Name("torch.UntypedStorage._cdata", "what that takes"),
    _DISPATCH,
    _FUNC,
)
FP8_KERNELS = Feature(
    "FP8 casts in kernels of their own on GPUs",
    "torch's ops make them, at several times the time",
    _FUNC,
    Name("torch._C._get_dispatch_mode", "whether a program is traced, which has no operator for a kernel"),
    Name("torch._C._TorchDispatchModeKey.PROXY", "the same"),
)

# torch.compile and TorchScript

COMPILED = Feature(
    "casts in compiled code",
    "compiled code runs eagerly while torch is converted",
    Name("torch._dynamo.trace_rules.load_object", "Dynamo's tables keep torch's functions, not the wrappers"),
    Name("torch._dynamo.trace_rules.get_tensor_method", "the same, of tensor methods"),
    Name("torch._dynamo.trace_rules.get_torch_obj_rule_map", "the table itself, which is built anew"),
    Name("torch._dynamo.variables.torch.get_overridable_functions", "another one, in newer versions", None),
    Name("torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers", "another one, the same", None),
    Name("torch._dynamo.variables.torch.constant_fold_functions", "holds torch's own is_autocast_enabled, not ours"),
    Name("torch._dynamo.utils.unpatched_nn_module_call", "a module with a region in its call is unpatched", None),
    Name("torch._dynamo.variables.nn_module.unpatched_nn_module_call", "the same", None),
    Name(f"{_GRAPH}.call_user_compiler", "graphs with regions are told of when they run"),
    Name(f"{_GRAPH}().root_tx", "the trace of the outermost function"),
    Name(f"{_GRAPH}().guards", "the guards of a graph"),
    Name(f"{_GRAPH}().current_tracer", "what regions do not count as side effects of"),
    Name(f"{_GRAPH}.add_cleanup_hook", "ends the regions that a trace has opened"),
    Name("torch._dynamo.output_graph.SubgraphTracer().side_effect_stack", "the same, in newer versions", None),
    Name(f"{_GRAPH}.resolve_source_value", "a decorator's object, in newer versions", None),
    Name("torch._dynamo.symbolic_convert.tls", "the trace that runs, as `current_tx`", off=None),
    Name("torch._dynamo.symbolic_convert:current_tx", "the same"),
    *(Name(f"{_TRACER}.{name}", "what it traces") for name in ("f_code", "parent", "output", "symbolic_locals")),
    Name(f"{_TRACER}.import_source", "names a module in a guard"),
    Name("torch._dynamo.source.AttrSource", "names an attribute in a guard"),
    Name("torch._dynamo.source.AttrSource.make_guard", "guards compiled code on the region around it"),
    Name("torch._dynamo.guards.GuardBuilder.EQUALS_MATCH", "the same"),
    Name("torch._dynamo.exc.SkipFrame", "leaves a function to Python whose region ends elsewhere"),
    Name("torch._dynamo.exc.UnspecializeRestartAnalysis", "traces anew where wrappers came in the middle"),
    Name("torch._guards.CompileContext.try_get", "whether it is tracing then"),
    Name("torch._dynamo.comptime.comptime", "looks at the tensors of a call that it traces"),
    Name("torch._dynamo.comptime.ComptimeContext.get_local", "the same"),
    Name(f"{_FRAME}.skip_code", "a wrapper behind a graph break is no graph of its own"),
    Name(f"{_CTX}.AutocastModeVariable.enter", "traces a region of hmpx in place of torch.autocast's"),
    Name(f"{_CTX}.AutocastModeVariable.exit", "the same"),
    Name(f"{_CTX}.AutocastModeVariable().target_values", "what the region asks for"),
    Name("torch._dynamo.variables.base.VariableTracker.build", "stands for what hmpx has Dynamo trace there"),
    *(
        Name(f"torch._dynamo.variables.base.VariableTracker.{name}", "the same")
        for name in ("as_proxy", "as_python_constant", "call_function", "realize")
    ),
    Name("torch._dynamo.variables.nn_module.NNModuleVariable().module_key", "the module that it inlines", None),
    _MARK,
)
COMPILED_STEPS = Feature(
    "optimizer steps in compiled code",
    "leave optimizer.step() out of what torch.compile is given",
    Name(f"{_FRAME}.set_code_exec_strategy", "optimizer steps are not compiled, nor their calls"),
    Name(f"{_FRAME}.FrameAction.SKIP", "the same"),
    Name(f"{_FRAME}.FrameExecStrategy", "the same"),
    Name("torch._dynamo.decorators:_torchdynamo_disable", "marks a function that Dynamo does not trace into"),
)
SCRIPT = Feature(
    "torch.jit.script while torch is converted",
    "it refuses what calls a function that is cast",
    Name("torch.jit._builtins._get_builtin_table", "takes a wrapper for the builtin that it stands for", off=dict),
    Name("torch.jit._recursive.try_compile_fn", "is given the original of a wrapper to compile"),
    Name("torch.jit._recursive.make_stub", "the same, of a method"),
)

# Weight updates

STEPS = Feature(
    "optimizer steps",
    "nothing is lost",
    Name("torch.Tensor._version", "whether an optimizer has written to a tensor", _WRITTEN),
    Name("torch.optim.Optimizer.profile_hook_step", "torch's wrapper around every step, in which ours stands", hooked),
    Name("torch._C._set_grad_enabled", "turns gradients off in one call, uninterrupted", torch.set_grad_enabled),
    *(
        Name(f"torch._foreach_{name}", "computes with many small tensors in one call", on_each(name))
        for name in ("add", "add_", "copy_", "div", "mul", "norm", "pow", "sqrt", "sub")
    ),
    Name("torch._C._dynamo.guards.TensorGuards", "whether all tensors are as in the last step", Guards),
    Name("torch._C._len_torch_dispatch_stack", "a dispatch mode hides writes; else each step counts on one", lambda: 1),
    Name("torch.utils._pytree.tree_leaves", "finds tensors", leaves),
    Name("torch.utils._pytree.tree_map", "changes them", map_tree),
    Name("torch.utils._pytree.tree_map_only", "the same", map_only),
    Name("torch._dynamo.eval_frame.OptimizedModule()._orig_mod", "no part of a parameter's name", None),
    Name("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:_checkpoint_wrapped_module", "the same", None),
)
LOADS = Feature(
    "FP32 state of BF16 parameters in load_state_dict",
    "torch casts it to BF16, and a resume is not exact",
    Name("torch.optim.Optimizer._process_value_according_to_param_policy", "keeps it"),
)
CLIPPING = Feature(
    "norms of BF16 gradients in FP64",
    "torch computes them in BF16, and clipping depends on the number of ranks",
    Name("torch.nn.utils.clip_grad._get_total_norm", "computes them"),
)
RELEASED = Feature(
    "release_gradients",
    "attach with release_gradients=False",
    Name("torch.Tensor._make_wrapper_subclass", "a gradient that has been stepped, without memory"),
    _GRAPH_TASK,
    _QUEUE,
)
UNSCALING = Feature(
    "GradScaler with BF16 gradients on a GPU",
    "torch refuses them",
    Name("torch._amp_foreach_non_finite_check_and_unscale_", "unscales them in FP32"),
)
SWAPPED = Feature(
    "hooks of a parameter that torch.utils.swap_tensors has exchanged",
    "they do not run any more",
    Name("torch.Tensor._post_accumulate_grad_hooks", "installs them again", off=property(lambda _: None)),
)

# Several ranks

FP32_SUMS = Feature(
    "use_fp32_grad_acc under DistributedDataParallel",
    "attach without it",
    _GRAPH_TASK,
    _QUEUE,
)
FSDP_SUMS = Feature(
    "use_fp32_grad_acc under fully_shard",
    "sums of micro-batches in BF16 are not refused: set reduce_dtype=torch.float32",
    Name("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "the dtype that FSDP2 adds gradients up in"),
    Name(
        "torch.distributed.fsdp._fully_shard._fsdp_state:_fsdp_param_groups", "the same; use_fp32_grad_acc wants 2.13"
    ),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup().fsdp_params", "the same"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup().mp_policy", "the same"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam().sharded_param", "the same"),
)
SHARDS = Feature(
    "updates of sharded parameters",
    "attach cannot step them",
    Name(f"{_DTENSOR}._utils.compute_local_shape_and_global_offset", "the place of a shard in the parameter"),
    Name(f"{_DTENSOR}.placement_types._StridedShard", "a shard of FSDP and more", ByName("_StridedShard", (), {})),
    Name("torch.distributed.fsdp._common_utils:_fsdp_flattened", "a parameter of FSDP1, which is refused", None),
)
KEPT_SHARDS = Feature(
    "kept steps of sharded parameters",
    "each step looks at every parameter anew",
    Name(f"{_DTENSOR}.DTensor()._local_tensor", "this rank's part of a tensor, without a call"),
)
AGREEMENT = Feature(
    "ranks that compare their settings",
    "they do not: see that seed, recipe and number of steps are the same on all",
    Name("torch.distributed.distributed_c10d._get_default_store", "what they compare by"),
)
JOINS = Feature(
    "a refusal of torch.distributed.algorithms.Join",
    "give every rank as many batches (drop_last=True of the sampler)",
    Name("torch.distributed.algorithms.join.Join()._enable", "whether ranks may step less often than others"),
    Name("torch.distributed.algorithms.join.Join()._joinables", "whose optimizer is not to be attached then"),
)
ZERO = Feature(
    "a refusal of ZeroRedundancyOptimizer(overlap_with_ddp=True)",
    "leave overlap_with_ddp out",
    Name(f"{_ZERO}._overlap_with_ddp", "its steps cannot be seen"),
)
TRIAL_STEPS = Feature(
    "distributed checkpoints of attached optimizers",
    "loading one counts a step more",
    Name("torch.distributed.checkpoint.state_dict._init_optim_state", "takes a step that is none of the training"),
)

# bench, record, doctor, compare, tune

HOST = Feature(
    "bench host",
    "it cannot call torch's fused steps on empty tensors",
    Name("torch._fused_adam_", "the step, without what the host does"),
    Name("torch._fused_adamw_", "the same"),
    Name("torch.optim.adam._fused_adam", "counts of steps that are on a GPU are not raised"),
)
DISPATCH = Feature(
    "record, doctor and compare",
    "they cannot look at ops",
    Name("torch.utils._python_dispatch.TorchDispatchMode", "sees the ops below Python", off=_NoMode),
    Name("torch.utils._python_dispatch._get_current_dispatch_mode", "whether it is the innermost", off=lambda: None),
    Name("torch._ops.OpOverload", "tells ops of the dispatcher from higher-order ones"),
    Name("torch._ops.OpOverload()._schema", "an op's name, and whether it writes"),
    Name("torch._ops.OpOverload().is_view", "whether it makes nothing new"),
    Name("torch._C._current_autograd_node", "tells backward from forward"),
    _GRAPH_TASK,
    _FUNC,
    Name("torch._C.DisableTorchFunctionSubclass", "reads dtypes of any class", off=contextlib.nullcontext),
    Name("torch.Tensor._base", "the tensor that a view is of", off=property(lambda _: None)),
    Name("torch.multiprocessing.reductions.StorageWeakRef.expired", "whether a storage is gone"),
    Name(
        "torch._dynamo.utils.counters", "how many functions were compiled", collections.defaultdict(collections.Counter)
    ),
)
LINES = Feature(
    "lines of what doctor finds in backward passes",
    "it names none",
    Name("torch.autograd._get_sequence_nr", "which node of autograd an op of the forward pass has made"),
    Name("torch.autograd.graph.Node._sequence_nr", "the same, of a node of the backward pass"),
)

FEATURES = [each for each in globals().values() if isinstance(each, Feature)]
_BY_PATH = {path: feature for feature in reversed(FEATURES) for path in feature.names}


def private(path: str) -> Any:
    """Return what torch has under a listed name, or its stand-in; else what raises as soon as it is used.

    >>> private("torch._C._set_grad_enabled")
    <built-in function _set_grad_enabled>
    """
    return _BY_PATH[path].get(path)


# Those that are asked for in several places
TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")
FakeTensor = private("torch._subclasses.FakeTensor")
graph_task = private("torch._C._current_graph_task_id")  # -1 outside of backward passes
autograd_node = private("torch._C._current_autograd_node")
in_torch_func = private("torch._C._functorch.peek_interpreter_stack")
dispatch_modes = private("torch._C._len_torch_dispatch_stack")
tree_leaves, tree_map, tree_map_only = (private(f"torch.utils._pytree.tree_{name}") for name in _TREES)
copy_all, add_to_all = private("torch._foreach_copy_"), private("torch._foreach_add_")
norms_of, powers_of = private("torch._foreach_norm"), private("torch._foreach_pow")
set_grad_enabled = private("torch._C._set_grad_enabled")
version_of, base_of = private("torch.Tensor._version").__get__, private("torch.Tensor._base").__get__


def has(path: str) -> bool:
    """Whether torch has a listed name."""
    return path in _BY_PATH and exists(path)


def lacks(path: str) -> bool:
    """Whether torch has not a name that is listed, which is then said if a feature is off because of it."""
    if path not in _BY_PATH or exists(path):
        return False
    _BY_PATH[path].is_on()
    return True
