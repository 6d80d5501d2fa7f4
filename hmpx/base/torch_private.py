"""Every name of torch that hmpx uses and torch does not document, by the feature of hmpx that needs it.

This is the list to go through when a new version of torch is out: `python -m hmpx explain --torch` says what of it the
installed one lacks. Code elsewhere gets these names from `private`, or asks a feature whether it is on, or, of
attributes of torch's objects, uses them as they stand here. Importing hmpx, eager `convert`, `attach` and
`disable_casts` need none of them.
Names without an underscore are listed where they stand in a private module, or have no words in torch's documentation.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from hmpx.base.torch_features import ByName, Feature, Name, exists, has_avx512, hooked, on_each, schemas

_FRAME, _GRAPH = "torch._dynamo.eval_frame", "torch._dynamo.output_graph.OutputGraph"
_TRACER = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"
_VARIABLES = "torch._dynamo.variables"
_REGION = f"{_VARIABLES}.ctx_manager.AutocastModeVariable"
_DTENSOR, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp._fully_shard"
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_SPELLS_OUT = "spells ops out in other ops, or counts on their dtypes: not cast, not mapped"
_PART, _NEWER = "a part of an op that has been cast", "the same, in newer versions"
_GRAPH_TASK = Name("torch._C._current_graph_task_id", "tells backward passes from each other", off=lambda: -1)
_QUEUE = Name("torch.autograd.Variable._execution_engine.queue_callback", "runs when a backward pass is done")
_LEAVES = Name("torch.utils._pytree.tree_leaves", "finds the tensors of a call")
_FUNC = Name("torch._C._functorch.peek_interpreter_stack", "whether torch.func runs", off=lambda: True)
_DISPATCH = Name("torch._C._len_torch_dispatch_stack", "whether a dispatch mode looks on", off=lambda: 1)
_USES = (
    Name("torch._C._storage_Use_Count", "whether something else holds the storage of a tensor that is kept"),
    Name("torch.UntypedStorage._cdata", "what that takes"),
)
_WRITTEN = property(lambda _: object())  # each look finds a write

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
    Name("torch._C._functorch.is_batchedtensor", "an op that vmap takes apart", lambda tensor: False),
    Name("torch._C._functorch.TransformType.[Vmap|Grad|Jvp]", "the same, and one that a derivative takes apart", None),
    Name("torch._C._autocast_supported_devices", "whether one of them has it on", lambda: ["cpu", "cuda"]),
    Name("torch.ops.mkldnn.[_is_mkldnn_bf16_supported|_is_mkldnn_fp16_supported]", "dtypes of the CPU", has_avx512),
    Name("torch.nn.Module._wrapped_call_impl", "the call of a module, with a region in one frame; else in two", None),
    Name("torch.nn.Module.[_compiled_call_impl|_call_impl]", "its two ways on", None),
    Name("torch.nn.parallel.replicate:_former_parameters", "those of a replica of DataParallel", None),
    Name("torch._subclasses.FakeTensor", "a compiler's tensor, without memory", ByName("FakeTensor", (), {})),
    Name("torch._subclasses.functional_tensor.FunctionalTensor", "the same", ByName("FunctionalTensor", (), {})),
    Name("torch.[_decomp|_functorch|_higher_order_ops|_inductor|_library|_meta_registrations]", _SPELLS_OUT, None),
    Name("torch.[_prims|_prims_common|_refs|_subclasses|_tensor_str|_utils|fx.experimental]", _SPELLS_OUT, None),
)
HOOKS = Feature(
    "hooks of gradients outside of the model",
    "ops in them are cast as a model's, and ops in the backward of a torch.autograd.Function as they come",
    Name("torch.autograd._engine_run_backward", "where a backward pass begins; else torch.autograd.backward", None),
    _GRAPH_TASK,
    Name("torch._C._current_autograd_node", "tells a function's backward from a hook", off=lambda: None),
    Name("torch._C.Future", "C++ makes these"),
    Name("torch._C.Future.[then|add_done_callback]", "what a hook leaves to be called on another thread"),
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
    Name("torch.utils.checkpoint.[_CheckpointFrame.__init__|CheckpointFunction.forward]", "keep a function for later"),
)
PARAMETRIZATIONS = Feature(
    "parametrizations in FP32",
    "those of BF16 weights are computed in BF16",
    Name("torch.nn.utils.parametrizations.[_Orthogonal|_SpectralNorm|_WeightNorm].forward", "computed in FP32"),
    Name("torch.nn.utils.[spectral_norm.SpectralNorm|weight_norm.WeightNorm].compute_weight", "the same"),
    Name("torch.nn.Module().[_parameters|_buffers]", "are given FP32 meanwhile, and what a record of a run puts back"),
)
DATA = Feature(
    "data loading outside of the model",
    'convert(where="everywhere") casts in data sets and collate functions',
    Name("torch.utils.data.[_utils.fetch._BaseDatasetFetcher|dataloader._BaseDataLoaderIter]", "no model's forward"),
)
LOADED = Feature(
    "dtypes of modules that torch.load has read",
    "a dtype_map leaves them as they are",
    Name("torch.nn.Module._apply", "maps them"),
)
AUTOCAST = Feature(
    "regions of torch.autocast in models",
    "op lists cast in torch.autocast(enabled=False) too, and torch.autocast(enabled=True) casts after them",
    Name("torch.autocast().[_enabled|fast_dtype|device]", "whether a region was to cast, to which dtype, and where"),
    Name("torch.autocast().prev", "what its exit sets again"),
)
REGISTERED = Feature(
    "operators with an autocast kernel of their author's",
    "op lists do not heed it",
    Name("torch._ops.[OpOverload|OpOverloadPacket].__call__", "the calls of operators"),
    Name("torch._ops.OpOverload()._name", "which operator it is"),
    Name("torch._ops.OpOverloadPacket()._qualified_op_name", "the same"),
    Name("torch._C.[_dispatch_has_kernel_for_dispatch_key|_dispatch_key_for_device]", "whether it has such a kernel"),
)
TENSOR_PARALLEL = Feature(
    "tensor parallelism under op lists",
    "nothing is lost: parts of an op that has been cast are left alone, where they have these names",
    Name(f"{_DTENSOR}.[_redistribute|_dispatch|_api].redistribute_local_tensor", _PART, None),
    Name(f"{_DTENSOR}._tp_conv.[tp_convolution|tp_convolution_backward]", _PART, None),
    Name(f"{_DTENSOR}.parallel.loss.[_log_softmax|_nll_loss_forward|_nll_loss_and_log_softmax_backward]", _PART, None),
    Name("torch._higher_order_ops.flex_attention.FlexAttention[HOP|BackwardHOP].__call__", _PART, None),
)
KEPT_CASTS = Feature(
    "cached_weights()",
    "it keeps no casts",
    Name("torch.Tensor._version", "whether a weight is as it was", off=_WRITTEN),
    *_USES,
    _DISPATCH,
    _FUNC,
)
FP8_KERNELS = Feature(
    "FP8 casts in kernels of their own on GPUs",
    "torch's ops make them, at several times the time",
    _FUNC,
    Name("torch._C.[_get_dispatch_mode|_TorchDispatchModeKey.PROXY]", "whether a trace runs: it takes no kernel"),
)

# torch.compile and TorchScript

COMPILED = Feature(
    "casts in compiled code",
    "compiled code runs eagerly while torch is converted",
    Name("torch._dynamo.trace_rules.[load_object|get_tensor_method]", "Dynamo's tables keep torch's functions"),
    Name("torch._dynamo.trace_rules.get_torch_obj_rule_map", "the table itself, which is built anew"),
    Name(f"{_VARIABLES}.torch.[get_overridable_functions|TorchInGraphFunctionVariable._get_handlers]", _NEWER, None),
    Name(f"{_VARIABLES}.torch.constant_fold_functions", "holds torch's own is_autocast_enabled, not ours"),
    Name("torch._dynamo.[utils|variables.nn_module].unpatched_nn_module_call", "unpatches a call with a region", None),
    Name(f"{_GRAPH}.call_user_compiler", "graphs with regions are told of when they run"),
    Name(f"{_GRAPH}().[root_tx|guards]", "the trace of the outermost function, the guards of a graph"),
    Name(f"{_GRAPH}().current_tracer", "what regions do not count as side effects of"),
    Name(f"{_GRAPH}.add_cleanup_hook", "ends the regions that a trace has opened"),
    Name("torch._dynamo.output_graph.SubgraphTracer().side_effect_stack", _NEWER, None),
    Name(f"{_GRAPH}.resolve_source_value", _NEWER, None),
    Name("torch._dynamo.symbolic_convert.tls", "the trace that runs, as `current_tx`", off=None),
    Name("torch._dynamo.symbolic_convert:current_tx", "the same"),
    Name(f"{_TRACER}().[f_code|parent|output|symbolic_locals]", "what it traces"),
    Name(f"{_TRACER}().import_source", "names a module in a guard"),
    Name("torch._dynamo.source.AttrSource", "names an attribute in a guard"),
    Name("torch._dynamo.[source.AttrSource.make_guard|guards.GuardBuilder.EQUALS_MATCH]", "guard code on its region"),
    Name("torch._dynamo.exc.SkipFrame", "leaves a function to Python whose region ends elsewhere"),
    Name("torch._dynamo.exc.UnspecializeRestartAnalysis", "traces anew where wrappers came in the middle"),
    Name("torch._guards.CompileContext.try_get", "whether it is tracing then"),
    Name(f"{_FRAME}.skip_code", "a wrapper behind a graph break is no graph of its own"),
    Name(f"{_REGION}.[enter|exit]", "trace a region of hmpx in place of torch.autocast's"),
    Name(f"{_REGION}().target_values", "what the region asks for"),
    Name(f"{_VARIABLES}.base.VariableTracker.build", "stands for what hmpx has Dynamo trace there"),
    Name(f"{_VARIABLES}.base.VariableTracker.[as_proxy|as_python_constant|call_function|realize]", "the same"),
    Name(f"{_VARIABLES}.nn_module.[NNModule|UnspecializedNNModule]Variable.call_function", "a call of a model"),
    Name(f"{_VARIABLES}.nn_module.NNModuleVariable().module_key", "the module that it inlines", None),
    Name("torch._dynamo.decorators:_dynamo_marked_constant", "marks a function that is called while it traces"),
)
COMPILED_STEPS = Feature(
    "optimizer steps in compiled code",
    "leave optimizer.step() out of what torch.compile is given",
    Name(f"{_FRAME}.[set_code_exec_strategy|FrameAction.SKIP|FrameExecStrategy]", "steps and their calls stay eager"),
    Name("torch._dynamo.decorators:_torchdynamo_disable", "marks a function that Dynamo does not trace into"),
)
SCRIPT = Feature(
    "torch.jit.script while torch is converted",
    "it refuses what calls a function that is cast",
    Name("torch.jit._builtins._get_builtin_table", "takes a wrapper for the builtin that it stands for", off=dict),
    Name("torch.jit._recursive.[try_compile_fn|make_stub]", "are given the original of a wrapper to compile"),
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
    Name("torch._C._len_torch_dispatch_stack", "a dispatch mode hides writes; else each step counts on one", lambda: 1),
    Name("torch._dynamo.eval_frame.OptimizedModule()._orig_mod", "no part of a parameter's name", None),
    Name("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:_checkpoint_wrapped_module", "the same", None),
)
KEPT_STEPS = Feature(
    "kept steps",
    "each step looks at every parameter anew",
    Name("torch._C._dynamo.guards.TensorGuards", "whether all tensors are as in the last step"),
)
KEPT_SHADOWS = Feature(
    "kept steps of optimizers without a formula",
    "each step makes FP32 copies of all parameters anew",
    *_USES,
    Name("torch.Tensor._use_count", "whether an optimizer keeps a copy that it was shown", off=lambda _: 0),
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
    _LEAVES,
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

FP32_SUMS = Feature("use_fp32_grad_acc under DistributedDataParallel", "attach without it", _GRAPH_TASK, _QUEUE)
FSDP_SUMS = Feature(
    "a refusal of BF16 sums of gradients under fully_shard",
    "with use_fp32_grad_acc set reduce_dtype=torch.float32",
    Name("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "the dtype that FSDP2 adds gradients up in"),
    Name(f"{_FSDP}._fsdp_state:_fsdp_param_group", "the same"),
    Name(f"{_FSDP}._fsdp_state:_fsdp_param_groups", _NEWER, None),
    Name(f"{_FSDP}._fsdp_param_group.FSDPParamGroup().fsdp_params", "the same"),
    Name(f"{_FSDP}._fsdp_param.FSDPParam().[sharded_param|mp_policy]", "the same"),
    Name(f"{_FSDP}._fsdp_param:_unsharded_param", "the whole copy of a shard, which is no weight of its own", None),
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
    Name("torch.distributed.distributed_c10d._get_default_group", "the group of all ranks"),
    Name("torch.distributed.distributed_c10d:_world", "all groups of ranks", None),
    Name("torch.distributed.ProcessGroup._get_sequence_number_for_group", "whether ranks have talked", None),
)
JOINS = Feature(
    "a refusal of torch.distributed.algorithms.Join",
    "give every rank as many batches (drop_last=True of the sampler)",
    Name("torch.distributed.algorithms.join.Join().[_enable|_joinables]", "whether ranks may step less often"),
)
ZERO = Feature(
    "a refusal of ZeroRedundancyOptimizer(overlap_with_ddp=True), and of one whose model was cast after it was made",
    "leave overlap_with_ddp and parameters_as_bucket_view out",
    Name(f"{_ZERO}.ZeroRedundancyOptimizer().[_overlap_with_ddp|_buckets]", "its steps or parameters cannot be seen"),
)
TRIAL_STEPS = Feature(
    "distributed checkpoints of attached optimizers",
    "loading one counts a step more",
    Name("torch.distributed.checkpoint.state_dict._init_optim_state", "takes a step that is none of the training"),
)

# record, doctor, compare, tune

DISPATCH = Feature(
    "record, doctor, compare and tune",
    "they cannot look at ops",
    Name("torch.utils._python_dispatch.TorchDispatchMode", "sees the ops below Python", off=object),
    Name("torch.utils._python_dispatch._get_current_dispatch_mode", "whether it is the innermost", off=lambda: None),
    _LEAVES,
    Name("torch.utils._pytree.[tree_map|tree_map_only]", "change the tensors of a call"),
    Name("torch._ops.OpOverload", "tells ops of the dispatcher from higher-order ones"),
    Name("torch._ops.OpOverload()._schema", "an op's name, and whether it writes"),
    Name("torch._C._current_autograd_node", "tells backward from forward"),
    _GRAPH_TASK,
    _FUNC,
    Name("torch._C.DisableTorchFunctionSubclass", "reads dtypes of any class", off=contextlib.nullcontext),
    Name("torch.Tensor._base", "the tensor that a view is of", off=property(lambda _: None)),
    Name("torch._C._RestorePythonTLSSnapshot", "whether torch.autocast casts an op", off=contextlib.nullcontext),
    Name("torch.multiprocessing.reductions.StorageWeakRef.expired", "whether a storage is gone"),
    Name("torch._dynamo.utils.counters", "how often it compiled", collections.defaultdict(collections.Counter)),
)
LINES = Feature(
    "lines of ops in backward passes",
    "doctor, compare and record --hash name the line that calls backward()",
    Name("torch.autograd._get_sequence_nr", "which node of autograd an op of the forward pass has made"),
    Name("torch._C._functions.AccumulateGrad._sequence_nr", "the same, of a node of the backward pass"),
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
tree_leaves, tree_map, tree_map_only = (
    private(f"torch.utils._pytree.tree_{name}") for name in ("leaves", "map", "map_only")
)
copy_all, add_to_all = private("torch._foreach_copy_"), private("torch._foreach_add_")
norms_of, powers_of = private("torch._foreach_norm"), private("torch._foreach_pow")
set_grad_enabled = private("torch._C._set_grad_enabled")
version_of, base_of = private("torch.Tensor._version").__get__, private("torch.Tensor._base").__get__


def has(path: str) -> bool:
    """Return whether torch has a listed name."""
    return path in _BY_PATH and exists(path)


def lacks(path: str) -> bool:
    """Return whether torch has not a name that is listed, which is then said if a feature is off because of it."""
    if path not in _BY_PATH or exists(path):
        return False
    _BY_PATH[path].is_on()
    return True
