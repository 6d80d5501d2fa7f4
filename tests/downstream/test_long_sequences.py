"""Models beside the lists of autocast on a GPU, put at torch's dispatcher; their positions go beyond 2,048.

They say "FP32 here" in the manner of their library, which differs from one version to the next: see the command of its
own in ../README.md, which runs this file with older ones.
"""

import copy
from pathlib import Path

import pytest
import torch
import yaml

import hmpx
from tests.downstream.zoo import LLAMA, T5, WORDS, floating, of, tokens, transformers
from tests.support.dispatched import autocasting

CUDA = yaml.safe_load((Path(__file__).parents[1] / "data" / "autocast" / "autocast_cuda.yaml").read_text())
LENGTH = 2100
LONG = {**LLAMA, "max_position_embeddings": 4096}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 4096, "reorder_and_upcast_attn": True}
FLUX = {
    "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8), "patch_size": 1,
}  # fmt: skip


def long_text():
    return {"input_ids": tokens(LENGTH, 1)}


def long_image():
    side = 48  # 2,304 places
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    return {
        "hidden_states": torch.randn(1, side * side, 4), "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8), "timestep": torch.tensor([0.5]), "txt_ids": torch.zeros(3, 3),
        "img_ids": torch.cat([torch.zeros(side * side, 1), 40.0 * places], -1),
    }  # fmt: skip


MODELS = {
    "llama": transformers("Llama", "ForCausalLM", long_text, **LONG),
    "mixtral": transformers("Mixtral", "ForCausalLM", long_text, **LONG, num_local_experts=4),
    "gpt2, upcast": transformers("GPT2", "LMHeadModel", long_text, **WORDS, **GPT2),
    "t5": transformers(
        "T5", "ForConditionalGeneration", lambda: {**long_text(), "decoder_input_ids": tokens(6, 1)}, **T5
    ),
    "diffusers flux": of("diffusers", "FluxTransformer2DModel", long_image, **FLUX),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_fp32_is_that_of_autocast(name):
    """Dtypes and bits of all outputs under the recipe, and a distance to FP32 like autocast's under each other one."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        exact = floating(model(**inputs))[0]
        with autocasting(CUDA["ops"]) as region, region():
            expected = floating(model(**inputs))
        with hmpx.activate({"extends": "autocast-cuda", "kernels": "native"}):
            found = floating(model(**inputs))
        others = {}
        for recipe in ("bf16-sr", "hmp-o2"):
            with hmpx.activate(recipe):
                others[recipe] = floating(copy.deepcopy(model)(**inputs))[0]
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, found, expected)), name

    def distance(got):
        return ((got.float() - exact).norm() / exact.norm()).item()

    assert all(distance(each) < 2 * distance(expected[0]) + 1e-3 for each in others.values()), name
