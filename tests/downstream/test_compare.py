"""`hmpx.compare` on architectures that people train, built tiny from their configurations."""

from __future__ import annotations

import pytest
import torch
import transformers

import hmpx

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def texts(masked):
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        ids = torch.randint(1, 100, (4, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        yield (ids, mask) if masked else (ids,)


def images(size):
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randn(8, 3, size, size, generator=generator), torch.randint(2, (8,), generator=generator)


def loss_of(model, *batch):
    names = ("pixel_values", "labels") if batch[0].is_floating_point() else ("input_ids", "attention_mask")
    given = dict(zip(names, batch, strict=False))
    return model(**{"labels": batch[0], **given}).loss


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **SIZES)), texts(True)


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=32)
    return transformers.GPT2LMHeadModel(config), texts(False)


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), texts(True)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **SIZES)), texts(False)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, **SIZES)), images(
        16
    )


def resnet():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config), images(32)


@pytest.mark.parametrize("make", [bert, gpt2, t5, llama, vit, resnet], ids=lambda make: make.__name__)
def test_every_op_is_compared_and_the_model_left_as_it_was(make):
    torch.manual_seed(0)
    model, batches = make()
    model.eval()  # the loss is computed again below, without dropout's numbers
    before = {key: value.clone() for key, value in model.state_dict().items()}
    linear = torch.nn.functional.linear
    found = hmpx.compare(model, list(batches), loss_of, lists="autocast-cpu")
    assert torch.nn.functional.linear is linear
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not [row for row in found.rows if row.note.startswith("not compared")]
    assert not found.is_broken, str(found)
    assert "linear" in {row.op for row in found.rows if row.error} and all(row.error < 0.02 for row in found.rows)
    with hmpx.convert(**_lists("autocast-cpu")):
        low = sum(float(loss_of(model, *batch).detach()) for batch in make()[1]) / 4
    assert found.loss + found.loss_change == pytest.approx(low, rel=1e-6)


def _lists(folder):
    from hmpx.ops.policies.op_lists import shipped

    return {f"{side}_file_path": shipped() / folder / f"{side}.txt" for side in ("bf16", "fp32", "promote")}
