"""Real architectures, made tiny from their own configurations: nothing is downloaded.

`ZOO[name]()` makes a model and its keyword arguments, from a fixed seed. The libraries are imported there and not
before: what conftest.py has frozen by then is not looked through for captured names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 40


def tokens(length: int = 12, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def pixels(size: int = 32, channels: int = 3, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def of(library: str, cls: str, inputs: Callable[[], dict], **sizes) -> Callable:
    """A model that its class makes of the sizes."""

    def make():
        return getattr(importlib.import_module(library), cls)(**sizes), inputs()

    return make


def transformers(name: str, head: str, inputs: Callable[[], dict], **sizes) -> Callable:
    """A model of transformers, whose class and configuration begin with a name."""

    def make():
        library = importlib.import_module("transformers")
        return getattr(library, name + head)(getattr(library, f"{name}Config")(**sizes)), inputs()

    return make


def text() -> dict:
    return {"input_ids": tokens()}


def padded_text() -> dict:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def text_to_text() -> dict:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(6)}


def image() -> dict:
    return {"pixel_values": pixels()}


def speech_to_text() -> dict:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens(6)}


def larger() -> dict:
    return {"x": pixels(64, batch=4)}


def denoising() -> dict:
    return {"sample": pixels(16, 4), "timestep": torch.tensor([3, 7]), "encoder_hidden_states": torch.randn(2, 5, 12)}


def denoising_by_class() -> dict:
    return {"hidden_states": pixels(8, 4), "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 4])}


class Recurrent(nn.Module):
    """Embedding, two layers of an RNN, a linear layer."""

    def __init__(self, kind: str, **options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = getattr(nn, kind)(16, 24, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.layers(self.embedding(input_ids))[0])


def recurrent(kind: str, **options) -> Callable:
    def make():
        model, inputs = Recurrent(kind, **options), text()
        model(**inputs)  # the lazy layer gets its size
        return model, inputs

    return make


def seq2seq():
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return model, {"src": torch.randn(2, 9, 16), "tgt": torch.randn(2, 6, 16), "tgt_mask": mask}


def lora():
    peft = importlib.import_module("peft")
    model, inputs = ZOO["llama"]()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config), inputs


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": VOCABULARY}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**WORDS, "max_position_embeddings": 64, **SIZES}
LLAMA = {**BERT, "num_key_value_heads": 1, "head_dim": 8, **SPECIAL}
VISION = {"image_size": 32, "patch_size": 8, **SIZES}
BART = {
    **WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "begin_suppress_tokens": None,
}  # fmt: skip
T5 = {**WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
SPEECH = {
    **WORDS, **SIZES, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
MAMBA = {**WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
SEGFORMER = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}
CLIP = {
    "text_config": {**LLAMA, "projection_dim": 16}, "vision_config": {**VISION, "projection_dim": 16},
    "projection_dim": 16, "logit_scale_init_value": 0.0,
}  # fmt: skip
UNET = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CONDITIONAL = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 4, "cross_attention_dim": 12,
}  # fmt: skip
VAE = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
DIT = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8,
    "patch_size": 2, "norm_num_groups": 4, "num_embeds_ada_norm": 10,
}  # fmt: skip
RESNET = {"num_classes": 10, "channels": (8, 16, 24, 32), "stem_width": 8}
MAXVIT = {"num_classes": 10, "img_size": 64, "embed_dim": (32,) * 4, "depths": (1,) * 4}
DENSENET = {"num_classes": 10, "growth_rate": 4, "block_config": (1, 1), "num_init_features": 8}

ZOO: dict[str, Callable[[], tuple[nn.Module, dict]]] = {
    "bert": transformers("Bert", "ForSequenceClassification", padded_text, **BERT),
    "albert": transformers("Albert", "Model", text, embedding_size=8, **BERT),
    "deberta": transformers("DebertaV2", "Model", text, **BERT, relative_attention=True, pos_att_type="p2c|c2p"),
    "fnet": transformers("FNet", "Model", text, **BERT, use_tpu_fourier_optimizations=False),
    "xlnet": transformers("XLNet", "LMHeadModel", text, **WORDS, d_model=16, n_layer=2, n_head=2, d_inner=32),
    "gpt2": transformers("GPT2", "LMHeadModel", padded_text, **WORDS, n_embd=16, n_layer=2, n_head=2),
    "bloom": transformers("Bloom", "ForCausalLM", text, **WORDS, hidden_size=16, n_layer=2, n_head=2),
    "llama": transformers("Llama", "ForCausalLM", padded_text, **LLAMA),
    "gemma2": transformers("Gemma2", "ForCausalLM", text, **LLAMA),
    "mixtral": transformers("Mixtral", "ForCausalLM", text, **LLAMA, num_local_experts=4, output_router_logits=True),
    "mamba": transformers("Mamba", "ForCausalLM", text, **MAMBA),
    "mamba2": transformers("Mamba2", "ForCausalLM", text, **MAMBA, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
    "t5": transformers("T5", "ForConditionalGeneration", text_to_text, **T5),
    "bart": transformers("Bart", "ForConditionalGeneration", text_to_text, **BART),
    "whisper": transformers("Whisper", "ForConditionalGeneration", speech_to_text, **WHISPER),
    "wav2vec2": transformers("Wav2Vec2", "Model", lambda: {"input_values": torch.randn(2, 400)}, **SPEECH),
    "vit": transformers("ViT", "ForImageClassification", image, **VISION),
    "swin": transformers("Swin", "ForImageClassification", image, **SWIN),
    "segformer": transformers("Segformer", "ForSemanticSegmentation", image, **SEGFORMER, decoder_hidden_size=16),
    "clip": transformers("CLIP", "Model", lambda: {**text(), **image()}, **CLIP),
    "timm resnet": of("timm.models", "resnet10t", lambda: {"x": pixels(96, batch=4)}, **RESNET),
    "timm efficientnet": of("timm.models", "test_efficientnet", larger, num_classes=10),
    "timm maxvit": of("timm.models", "maxvit_rmlp_pico_rw_256", larger, **MAXVIT),
    "torchvision densenet": of("torchvision.models", "DenseNet", larger, **DENSENET),
    "diffusers conditional unet": of("diffusers", "UNet2DConditionModel", denoising, **UNET, **CONDITIONAL),
    "diffusers vae": of("diffusers", "AutoencoderKL", lambda: {"sample": pixels(16)}, **UNET, **VAE),
    "diffusers dit": of("diffusers", "DiTTransformer2DModel", denoising_by_class, **DIT),
    "peft lora": lora,
    "torch transformer": seq2seq,
    "torch lstm": recurrent("LSTM"),
    "torch gru": recurrent("GRU", bidirectional=True),
}

# What has no kernel in BF16, and neither the default lists nor autocast's for CUDA name: it raises, as in plain torch.
NO_KERNEL = {"fnet": "Unsupported dtype BFloat16"}


def floating(outputs) -> list[torch.Tensor]:
    """Every floating tensor of a model's output, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, dict):
        outputs = outputs.values()
    elif not isinstance(outputs, list | tuple):
        outputs = vars(outputs).values() if hasattr(outputs, "__dict__") else ()
    return [tensor for output in outputs for tensor in floating(output)]
