"""Stand-ins for systems that do not run here: their documented signatures, which a call must fit.

Sources: the guides of Habana's HMP, which were taken off the net in 2023 (`hmpx.hmp` keeps its signature); the
documentation of apex.amp; neuronx_distributed.trainer of Neuron SDK 2.2x, and its guide to training APIs; the Neuron
tutorial on BERT, whose optimizer is transformers' AdamW with FP32 copies.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any
from unittest import mock

import torch


class hmp:
    @staticmethod
    def convert(opt_level="O1", bf16_file_path="", fp32_file_path="", isVerbose=False): ...

    @staticmethod
    def disable_casts(): ...


class amp:
    @staticmethod
    def initialize(
        models, optimizers=None, enabled=True, opt_level="O1", cast_model_type=None, patch_torch_functions=None,
        keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1,
        verbosity=1, min_loss_scale=None, max_loss_scale=2.0**24,
    ): ...  # fmt: skip

    @staticmethod
    def scale_loss(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False): ...


class nxd:
    @staticmethod
    def neuronx_distributed_config(
        tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1, context_parallel_size=1,
        pipeline_config=None, optimizer_config=None, activation_checkpoint_config=None, pad_model=False,
        sequence_parallel=False, model_init_config=None, lora_config=None, mixed_precision_config=None,
        sequential_move_factor=11, lnc_size=1,
    ): ...  # fmt: skip

    @staticmethod
    def initialize_parallel_model(nxd_config, model_fn, include_buffers=False, *model_args, **model_kwargs): ...

    @staticmethod
    def initialize_parallel_optimizer(nxd_config, optimizer_class, parameters, **defaults): ...


def adamw_fp32_params_copy(
    params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, correct_bias=True
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr, betas, eps, weight_decay)


def _stand_in(system: type, **results: Any) -> mock.NonCallableMagicMock:
    """Functions with the signatures of the system's, which give these results."""
    made = types.SimpleNamespace()
    for name, result in results.items():
        setattr(made, name, mock.create_autospec(getattr(system, name), side_effect=result))
    return made  # type: ignore[return-value]


def _config(optimizer_config=None, mixed_precision_config=None, **rest):
    return {"optimizer_config": optimizer_config or {}, "mixed_precision_config": mixed_precision_config or {}}


def _optimizer(config, cls, parameters, **defaults):
    zero = config["optimizer_config"].get("zero_one_enabled", False)
    if any(config["mixed_precision_config"].values()) and not zero:
        raise RuntimeError("ZeRO-1 optimizer is not enabled")  # as NxD does
    return cls(parameters, **defaults)


def stand_ins() -> dict[str, Any]:
    """By the name that a script knows them by."""
    return {
        "hmp": _stand_in(hmp, convert=lambda *_, **__: None, disable_casts=contextlib.nullcontext),
        "amp": _stand_in(
            amp,
            initialize=lambda model, optimizer, **_: (model, optimizer),
            scale_loss=lambda loss, optimizer, **_: contextlib.nullcontext(loss),
        ),
        "nxd": _stand_in(
            nxd,
            neuronx_distributed_config=_config,
            initialize_parallel_model=lambda config, make: make(),
            initialize_parallel_optimizer=_optimizer,
        ),
        "AdamW_FP32ParamsCopy": mock.create_autospec(adamw_fp32_params_copy, side_effect=adamw_fp32_params_copy),
    }


def never_called(made: dict[str, Any], text: str) -> list[str]:
    """The functions of a stand-in that a script names and has not called."""
    functions = {f"{name}.{key}": each for name, one in made.items() for key, each in vars(one).items()}
    return [name for name, function in functions.items() if f"{name}(" in text and not function.called]
