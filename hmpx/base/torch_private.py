"""Every private name of torch that hmpx uses, and what hmpx does with it.

Torch promises nothing about these names. Code uses them where it needs them; this is the list to go through when a new
version of torch is out. `lost()` says which of them the installed one does not have any more, and the tests hold the
list complete.

`Optimizer()._optimizer_step_pre_hooks` stands for an attribute of the objects of a class; ``module:word`` for a word
that the source of a module knows, such as a mark on somebody else's object. Names without an underscore are listed
where they stand in a private module or are not documented. All were seen in 2.9.1, 2.13.0 and 2.15.0; "(2.13.0)" is
seen there alone.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from typing import Any

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer()"
_CHECKPOINTED = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
NAMES: dict[str, str] = {
    # The catalogue of ops (`ops.policies.catalog`), and how arguments are told apart
    "torch._C._nn": "C functions of torch.nn.functional are entry points of their own",
    "torch._C._VariableFunctions": "names every C function of torch",
    "torch._VF": "RNN layers call torch's C functions by it",
    "torch._C.TensorBase": "names every C method of a tensor; its `data` is watched by kept casts",
    "torch._C._jit_get_schemas_for_operator": "which arguments of an op are tensors, views or defaults",
    "torch.nn.RNNBase()._flat_weights": "the weights that RNNs compare their input's dtype with",
    # Functions that are patched beside the ops
    "torch._linalg_utils": "the module of functions that torch has removed: a list may still name them",
    "torch.utils.checkpoint._CheckpointFrame": "keeps a function for backward, to be run in the region of the forward",
    "torch.nn.utils.clip_grad._get_total_norm": "no model's forward: casts are off inside",
    "torch.utils.data._utils.fetch._BaseDatasetFetcher": "no model's forward, in workers too",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "the same, in the main process",
    **{
        f"torch.distributed.tensor.{name}": "parts of an op that has been cast: not cast again"  # seen in 2.13.0 alone
        for name in (
            *("_redistribute.redistribute_local_tensor", "_tp_conv.tp_convolution", "_tp_conv.tp_convolution_backward"),
            *("parallel.loss._log_softmax", "parallel.loss._nll_loss_forward"),
            "parallel.loss._nll_loss_and_log_softmax_backward",
        )
    },
    "torch.autograd._engine_run_backward": "what hooks compute in a backward pass is no model's forward",
    "torch.nn.Module._wrapped_call_impl": "the call of a module, in whose place a region of its own is opened",
    "torch.nn.Module._compiled_call_impl": "one of its two ways on",
    "torch.nn.Module._call_impl": "the other one",
    "torch.nn.Module._apply": "maps the dtypes of a module that torch.load has read",
    # What else torch's own code calls ops for: such calls are no calls of the user's
    **{
        f"torch.{name}": "spells ops out in other ops, or counts on their dtypes: not cast, not mapped"
        for name in (
            *("_decomp", "_functorch", "_higher_order_ops", "_inductor", "_library", "_meta_registrations", "_prims"),
            *("_prims_common", "_refs", "_subclasses", "_tensor_str", "_utils"),
        )
    },
    "torch.utils._device._device_constructors": "functions that `with torch.device(...)` gives a device to",
    "torch._subclasses.functional_tensor": "hands on the dtype that a compiled function asks for",
    # torch.compile
    "torch._dynamo.reset": "what was compiled under other casts is compiled anew",
    "torch._dynamo.trace_rules.load_object": "Dynamo's tables keep torch's functions, not the wrappers",
    "torch._dynamo.trace_rules.get_tensor_method": "the same, of tensor methods",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map": "the table itself, which is built anew",
    "torch._dynamo.variables.torch.get_overridable_functions": "another table (2.13.0)",
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers": "another one (2.13.0)",
    "torch._dynamo.output_graph.OutputGraph.call_user_compiler": "graphs with regions are told of when they run",
    "torch._dynamo.eval_frame.skip_code": "a wrapper behind a graph break is no graph of its own",
    "torch._dynamo.eval_frame.set_code_exec_strategy": "optimizer steps are not compiled, nor their calls",
    "torch._dynamo.eval_frame.FrameAction": "the same",
    "torch._dynamo.eval_frame.FrameExecStrategy": "the same",
    "torch._dynamo.decorators:_torchdynamo_disable": "marks a function that Dynamo does not trace into",
    "torch._dynamo.comptime.comptime": "calls hmpx while a function with a region in it is compiled",
    "torch._dynamo.decorators:_dynamo_marked_constant": "marks a function that is called while it traces (2.13.0)",
    "torch._dynamo.exc.UnspecializeRestartAnalysis": "traces anew where wrappers came in the middle (2.13.0)",
    "torch._guards.CompileContext": "whether it is tracing then (2.13.0)",
    "torch._dynamo.eval_frame.OptimizedModule()._orig_mod": "no part of a parameter's name",
    "torch._dynamo.utils.unpatched_nn_module_call": "a module whose call opens a region counts as unpatched",
    "torch._dynamo.variables.nn_module.unpatched_nn_module_call": "the same",
    "torch._dynamo.variables.ctx_manager.AutocastModeVariable": "traces a region of hmpx in place of torch.autocast's",
    "torch._dynamo.variables.torch.constant_fold_functions": "holds torch's own is_autocast_enabled, and not ours",
    "torch._dynamo.variables.base.VariableTracker": "stands for what hmpx has Dynamo trace there",
    # torch.autocast
    "torch.autocast()._enabled": "whether a region was to cast",
    "torch._C._is_autocast_available": "whether torch's own autocast can be on inside of an op there",
    "torch._C._is_any_autocast_enabled": "whether torch's own autocast is on where a conversion begins",
    # TorchScript
    "torch.jit._builtins._get_builtin_table": "takes a wrapper for the builtin that it stands for",
    "torch.jit._recursive.try_compile_fn": "is given the original of a wrapper to compile",
    "torch.jit._recursive.make_stub": "the same, of a method",
    # Casts of weights that are kept, and FP32 kernels
    "torch.Tensor._version": "counts the writes to a tensor, so that a kept cast is not an old one",
    "torch._C._storage_Use_Count": "a weight whose storage something else holds is not kept",
    "torch.UntypedStorage._cdata": "what that takes",
    "torch._C._len_torch_dispatch_stack": "a cast that a dispatch mode looks at is not kept",
    "torch._C._functorch.peek_interpreter_stack": "nor is one inside torch.func, where no kernel casts to FP8 either",
    "torch._C._get_dispatch_mode": "nor where a program is traced, which has no operator for a kernel",
    "torch._C._TorchDispatchModeKey": "the same",
    "torch._subclasses.FakeTensor": "a compiler's tensor has no memory to be written to",
    "torch.autograd.forward_ad._current_level": "inside forward AD, hooks do not see whole tensors",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether the CPU has instructions for BF16",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "the same for FP16",
    # what escapes: `insight.escaped`
    "torch.utils._python_dispatch.TorchDispatchMode": "sees the ops below Python",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "whether it is the innermost mode",
    "torch.utils._pytree.tree_leaves": "finds the tensors in an op's arguments",
    "torch._ops.OpOverload": "tells ops of the dispatcher from higher-order ones",
    "torch._ops.OpOverload()._schema": "an op's name, and whether it writes",
    "torch._C._current_autograd_node": "tells backward from forward, and a function's backward from a hook",
    # doctor: `insight.capture`
    "torch.autograd._get_sequence_nr": "which node of autograd an op of the forward pass has made",
    "torch.autograd.graph.Node._sequence_nr": "the same, of a node of the backward pass",
    # record
    "torch._C.DisableTorchFunctionSubclass": "reads dtypes of tensors whose classes know no function for that",
    "torch._C._DisableTorchDispatch": "what it computes itself is seen by no dispatch mode",
    "torch.Tensor._base": "the tensor that a view is of",
    # Optimizers
    "torch.optim.Optimizer.profile_hook_step": "torch's wrapper around every step, in which ours stands",
    "torch.optim.Optimizer._process_value_according_to_param_policy": "a load keeps FP32 state FP32",
    "torch.optim.Optimizer()._optimizer_step_pre_hooks": "whether Optimizer.__init__ has run",
    "torch.optim.Optimizer()._optimizer_state_dict_pre_hooks": "whether a checkpoint can be told the step",
    "torch.optim.Optimizer()._optimizer_state_dict_post_hooks": "the user's hooks see the masters",
    "torch.optim.Optimizer()._optimizer_load_state_dict_pre_hooks": "the user's hooks run before ours",
    "torch._fused_adam_": "`bench host` calls it on empty tensors",
    "torch._fused_adamw_": "as `_fused_adam_`",
    "torch.optim.adam:_fused_adam": "`bench host` leaves out the increment of counts that are on a GPU",
    "torch._foreach_copy_": "copies many small tensors in one call",
    "torch._foreach_add_": "the same, in place",
    "torch._foreach_norm": "the largest number, or the norm, of each of many small tensors in one call",
    "torch._foreach_pow": "the squares of norms, in one call",
    "torch._C._dynamo.guards.TensorGuards": "whether all tensors have the class, dtype and layout of the last step",
    "torch._C._set_grad_enabled": "turns gradients off in a step, in one call that an interrupt cannot cut in two",
    # Gradients
    "torch.Tensor._post_accumulate_grad_hooks": "hooks on a parameter whose content was swapped",
    "torch._C._current_graph_task_id": "tells one backward pass from the next, and hooks of gradients from a forward",
    "torch.autograd.Variable._execution_engine.queue_callback": "runs when a backward pass is done",
    "torch.Tensor._make_wrapper_subclass": "a gradient that has been stepped, without memory",
    # Several ranks
    "torch.distributed.algorithms.join.Join()._enable": "whether ranks may step less often than others",
    "torch.distributed.algorithms.join.Join()._joinables": "whose optimizer is not to be attached then",
    "torch.nn.Module()._buffers": "the buffers that a record of a run holds beside parameters",
    "torch.nn.Module()._modules": "whether a module's constructor has run",
    f"{_ZERO}._overlap_with_ddp": "is refused: its steps cannot be seen",
    "torch.distributed.distributed_c10d._get_default_store": "what ranks compare their settings by",
    "torch.distributed.tensor.placement_types._StridedShard": "a shard of FSDP and tensor parallelism",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "the place of a shard in the parameter",
    "torch.distributed.fsdp._common_utils:_fsdp_flattened": "a parameter of FSDP1, which is refused",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "the dtype that FSDP2 adds gradients up in",
    "torch.distributed.fsdp._fully_shard._fully_shard:_fsdp_param_groups": "the same",
    f"{_CHECKPOINTED}:_checkpoint_wrapped_module": "no part of a parameter's name",
    "torch.distributed.checkpoint.state_dict._init_optim_state": "takes a step that is no step of the training",
}


def lost() -> list[str]:
    """The names that the installed torch lacks."""
    return [name for name in NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    module, mentioned, word = name.partition(":")
    owner, of_object, attribute = name.partition("().")
    try:
        if mentioned:
            return re.search(rf"\b{word}\b", inspect.getsource(pkgutil.resolve_name(module))) is not None
        if of_object:
            return attribute in set(_words(pkgutil.resolve_name(owner)))
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _words(cls: type) -> Iterator[Any]:
    """The names and strings in the methods of a class, which show the attributes that its objects have."""
    for function in vars(cls).values():
        if isinstance(function, types.FunctionType):
            yield from (*function.__code__.co_names, *function.__code__.co_consts)
