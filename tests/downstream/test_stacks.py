"""Stacks of libraries that people train with: PEFT, TRL, sentence-transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import hmpx
from hmpx.integrations.transformers import HmpxCallback
from tests.downstream.by_hand import AUTOCASTS, bits
from tests.downstream.trainer import NO_DROPOUT, gpt2, texts

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16
QUIET = {
    "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4,
    "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True, "save_strategy": "no",
    "dataloader_pin_memory": False, "gradient_checkpointing": False, "seed": 3, "max_length": 12,
}  # fmt: skip


def _lora():
    from peft import LoraConfig, get_peft_model

    model = gpt2(**NO_DROPOUT).bfloat16()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))


def _losses(model, optimizer, steps=3, autocast=False):
    batch = torch.stack([text["input_ids"] for text in texts(4)])
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", BF16, enabled=autocast, cache_enabled=False):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_lora_on_a_bf16_base_has_the_bits_of_autocast_and_the_base_stays_bf16():
    """PEFT makes the adapters FP32 over a BF16 base; a recipe with FP32 weights widens none of the frozen base."""
    ours, theirs = _lora(), _lora()
    optimizers = [optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (ours, theirs)]
    expected = _losses(theirs, optimizers[1], autocast=True)
    hmpx.prepare(ours, optimizers[0], {**AUTOCASTS, "parameter_dtype": "float32"})
    assert _losses(ours, optimizers[0]) == expected
    assert {p.dtype for p in ours.parameters() if not p.requires_grad} == {BF16}
    assert bits(ours) == bits(theirs)


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(37))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def _sentence(i, words=6):
    return " ".join(f"w{(i * 7 + j * 3) % 37}" for j in range(words))


def _by_trl(kind, recipe, folder, **more):
    """The model that TRL has trained, and the mean of its losses."""
    import datasets
    import trl

    model, count = gpt2(**NO_DROPOUT), range(16)
    given, others = {**QUIET, "bf16": False, "output_dir": str(folder), **more}, {}
    if kind in ("DPO", "KTO"):
        others["ref_model"] = copy.deepcopy(model)
    if kind == "SFT":
        data = [{"text": _sentence(i)} for i in count]
    elif kind == "KTO":
        data = [{"prompt": _sentence(i, 2), "completion": _sentence(i + 1), "label": i % 2 == 0} for i in count]
    elif kind == "GRPO":  # which samples from the model, so that only the first step is the same
        data = [{"prompt": _sentence(i, 2)} for i in count]
        others["reward_funcs"] = lambda completions, **_: [float(len(set(each.split()))) for each in completions]
        given |= {"num_generations": 4, "max_completion_length": 6, "max_steps": 1}
        del given["max_length"]
    else:
        data = [{"prompt": _sentence(i, 2), "chosen": _sentence(i + 1), "rejected": _sentence(i + 5)} for i in count]
    settings = getattr(trl, f"{kind}Config")(**given)
    callbacks = [HmpxCallback(recipe)] if recipe is not None else []
    trainer = getattr(trl, f"{kind}Trainer")(
        model, args=settings, train_dataset=datasets.Dataset.from_list(data), processing_class=_tokenizer(),
        callbacks=callbacks, **others,
    )  # fmt: skip
    return model, trainer.train().training_loss


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO"])
def test_trl_by_callback_trains_as_in_fp32(kind, tmp_path):
    before = gpt2(**NO_DROPOUT)
    wide, expected = _by_trl(kind, None, tmp_path)
    model, loss = _by_trl(kind, {**AUTOCASTS, "weights": "stochastic"}, tmp_path)
    hmpx.restore()
    assert {p.dtype for p in model.parameters()} == {BF16} and {p.dtype for p in wide.parameters()} == {torch.float32}
    assert loss == pytest.approx(expected, rel=0.01)
    moved, should = (
        torch.cat([(p.float() - q).flatten() for p, q in zip(m.parameters(), before.parameters(), strict=True)])
        for m in (model, wide)
    )
    assert F.cosine_similarity(moved, should, dim=0) > 0.95


def test_trls_own_bf16_is_refused_in_words_that_fit(tmp_path):
    with pytest.raises(hmpx.HmpxError, match=r"write bf16=False, which SFTConfig sets by itself"):
        _by_trl("SFT", "neuron-bf16-sr", tmp_path, bf16=True)


def test_sentence_transformers_loaded_in_bf16_moves_as_in_fp32(tmp_path):
    """At a learning rate whose updates BF16 loses: without hmpx the weights stay where they are."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(**sizes, **rates, intermediate_size=32)).save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)

    def moved(dtype, attached):
        words = Transformer(str(tmp_path), model_kwargs={"dtype": dtype})
        model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device="cpu")
        assert {p.dtype for p in model.parameters()} == {dtype}
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-6, weight_decay=0.0)
        if attached:
            hmpx.attach(optimizer)
        before = copy.deepcopy(model)
        left, right = (model.tokenize([_sentence(i + shift) for i in range(8)]) for shift in (0, 3))
        for _ in range(20):
            one, other = (model(dict(each))["sentence_embedding"] for each in (left, right))
            (1 - F.cosine_similarity(one.float(), other.float())).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        of = dict(model.named_parameters()), dict(before.named_parameters())
        name = next(each for each in of[0] if each.endswith("layer.0.output.dense.weight"))
        return (of[0][name] - of[1][name]).detach().double().flatten()

    wide, lost, kept = moved(torch.float32, False), moved(BF16, False), moved(BF16, True)
    assert lost.count_nonzero() < 0.2 * lost.numel()  # all but those near 0
    signs = wide.sign()
    assert (kept @ signs) / wide.abs().sum() == pytest.approx(1, abs=0.35)
