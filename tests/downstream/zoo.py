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


def transformers(cls: str, config: str, inputs: Callable[[], dict], **sizes) -> Callable:
    def make():
        library = importlib.import_module("transformers")
        return getattr(library, cls)(getattr(library, config)(**sizes)), inputs()

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


def timm(name: str, size: int, **sizes) -> Callable:
    def make():
        models = importlib.import_module("timm.models")
        return getattr(models, name)(num_classes=10, **sizes), {"x": pixels(size, batch=4)}

    return make


def torchvision(name: str, size: int, **sizes) -> Callable:
    def make():
        models = importlib.import_module("torchvision.models")
        return getattr(models, name)(num_classes=10, **sizes), {"x": pixels(size, batch=4)}

    return make


def diffusers(cls: str, inputs: Callable[[], dict], **sizes) -> Callable:
    def make():
        return getattr(importlib.import_module("diffusers"), cls)(**sizes), inputs()

    return make


def denoising(channels: int = 3, **more) -> dict:
    return {"sample": pixels(16, channels), "timestep": torch.tensor([3, 7]), **more}


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
BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **SIZES}
LLAMA = {**BERT, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"image_size": 32, "patch_size": 8, **SIZES}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
SPEECH = {
    **SIZES,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": VOCABULARY,
}
UNET = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}

ZOO: dict[str, Callable[[], tuple[nn.Module, dict]]] = {
    "bert": transformers("BertForSequenceClassification", "BertConfig", padded_text, **BERT),
    "albert": transformers("AlbertModel", "AlbertConfig", text, embedding_size=8, **BERT),
    "electra": transformers("ElectraModel", "ElectraConfig", text, embedding_size=8, **BERT),
    "deberta": transformers(
        "DebertaV2Model", "DebertaV2Config", text, **BERT, relative_attention=True, pos_att_type="p2c|c2p"
    ),
    "fnet": transformers("FNetModel", "FNetConfig", text, **BERT, use_tpu_fourier_optimizations=False),
    "xlnet": transformers(
        "XLNetLMHeadModel", "XLNetConfig", text, vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=32
    ),
    "gpt2": transformers(
        "GPT2LMHeadModel", "GPT2Config", padded_text, vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2
    ),
    "gpt-neox": transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", text, **BERT),
    "bloom": transformers(
        "BloomForCausalLM", "BloomConfig", text, vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2
    ),
    "llama": transformers("LlamaForCausalLM", "LlamaConfig", padded_text, **LLAMA),
    "gemma2": transformers("Gemma2ForCausalLM", "Gemma2Config", text, **LLAMA),
    "qwen2": transformers("Qwen2ForCausalLM", "Qwen2Config", text, **LLAMA),
    "mixtral": transformers(
        "MixtralForCausalLM", "MixtralConfig", text, **LLAMA, num_local_experts=4, output_router_logits=True
    ),
    "mamba": transformers("MambaForCausalLM", "MambaConfig", text, **MAMBA),
    "mamba2": transformers(
        "Mamba2ForCausalLM", "Mamba2Config", text, **MAMBA, num_heads=4, head_dim=8, n_groups=2, chunk_size=4
    ),
    "t5": transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        text_to_text,
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        decoder_start_token_id=0,
        d_ff=32,
        num_layers=2,
        num_heads=2,
    ),
    "bart": transformers("BartForConditionalGeneration", "BartConfig", text_to_text, **BART),
    "whisper": transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens(6)},
        **BART,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        begin_suppress_tokens=None,
    ),
    "wav2vec2": transformers(
        "Wav2Vec2Model", "Wav2Vec2Config", lambda: {"input_values": torch.randn(2, 400)}, **SPEECH, mask_time_prob=0.0
    ),
    "vit": transformers("ViTForImageClassification", "ViTConfig", image, **VISION),
    "swin": transformers(
        "SwinForImageClassification",
        "SwinConfig",
        image,
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 2],
        window_size=4,
    ),
    "convnext": transformers(
        "ConvNextForImageClassification", "ConvNextConfig", image, hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 1]
    ),
    "segformer": transformers(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        image,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    "clip": transformers(
        "CLIPModel",
        "CLIPConfig",
        lambda: {**text(), **image()},
        text_config={**LLAMA, "projection_dim": 16},
        vision_config={**VISION, "projection_dim": 16},
        projection_dim=16,
        logit_scale_init_value=0.0,
    ),
    "timm resnet": timm("resnet10t", 96, channels=(8, 16, 24, 32), stem_width=8),
    "timm efficientnet": timm("test_efficientnet", 64),
    "timm regnet": timm("regnetx_002", 64),
    "timm maxvit": timm("maxvit_rmlp_pico_rw_256", 64, img_size=64, embed_dim=(32, 32, 32, 32), depths=(1, 1, 1, 1)),
    "torchvision mobilenet": torchvision(
        "MobileNetV2", 64, inverted_residual_setting=[[1, 8, 1, 1], [4, 12, 1, 2], [4, 16, 2, 2]], width_mult=0.5
    ),
    "torchvision densenet": torchvision("DenseNet", 64, growth_rate=4, block_config=(1, 1), num_init_features=8),
    "diffusers unet": diffusers(
        "UNet2DModel",
        denoising,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **UNET,
    ),
    "diffusers conditional unet": diffusers(
        "UNet2DConditionModel",
        lambda: denoising(4, encoder_hidden_states=torch.randn(2, 5, 12)),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
        cross_attention_dim=12,
        **UNET,
    ),
    "diffusers vae": diffusers(
        "AutoencoderKL",
        lambda: {"sample": pixels(16)},
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **UNET,
    ),
    "diffusers dit": diffusers(
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": pixels(8, 4),
            "timestep": torch.tensor([3, 7]),
            "class_labels": torch.tensor([1, 4]),
        },
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    ),
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
