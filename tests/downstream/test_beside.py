"""PEFT, bitsandbytes and torchao beside hmpx, on a tiny model from a config: the bits of a loop by hand."""

from __future__ import annotations

import peft
import pytest
import torch

import hmpx
from tests.downstream.by_hand import RECIPES, ByHand, bits, digest, state_bits
from tests.downstream.trainer import NO_DROPOUT, gpt2, texts, trained

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = [torch.stack([text["input_ids"] for text in texts()[i : i + 4]]) for i in range(0, 32, 4)]


def lora(**more):
    """Adapters on the attention of a frozen base; both their matrices have values, so that both get gradients."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], init_lora_weights=False, **more)
    model = gpt2(**NO_DROPOUT)
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch, num_items_in_batch=torch.tensor(48)).loss


def adapters(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def trained_by_hand(model, way, optimizer, of=lambda name: True):
    return ByHand(model, way, optimizer, of).train(BATCHES, loss_of=loss_of).model


@pytest.mark.parametrize("way", ["stochastic", "master"])
def test_adapters_in_bf16_on_a_frozen_bf16_base(way, tmp_path):
    """By `prepare` in a plain loop, and by the callback in a Trainer; the base keeps its bits."""
    expected = trained_by_hand(lora(), way, adapters, lambda name: "lora" in name)
    by_trainer = lora()
    trained(by_trainer, RECIPES[way], tmp_path, max_grad_norm=0.0, weight_decay=0.0)
    hmpx.restore()
    by_prepare = lora()
    optimizer = adapters(p for p in by_prepare.parameters() if p.requires_grad)
    hmpx.prepare(by_prepare, optimizer, RECIPES[way])
    for batch in BATCHES:
        loss_of(by_prepare, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bits(by_trainer) == bits(by_prepare) == bits(expected)
    before = lora().bfloat16().state_dict()
    after = by_trainer.state_dict()
    changed = {name for name in after if digest(after[name]) != digest(before[name])}
    assert changed == {name for name in after if "lora" in name}


def test_a_resumed_run_of_adapters_has_the_bits_of_an_unbroken_one(tmp_path):
    """Trainer's checkpoint has the adapters and their optimizer's state."""
    how = {"save_strategy": "steps", "save_steps": 4}
    unbroken, resumed = lora(lora_dropout=0.1), lora(lora_dropout=0.1)
    whole = trained(unbroken, RECIPES["master"], tmp_path, **how)
    rest = trained(resumed, RECIPES["master"], tmp_path, resume=str(tmp_path / "checkpoint-4"), **how)
    assert bits(unbroken) == bits(resumed)
    assert state_bits(whole.optimizer) == state_bits(rest.optimizer)


def test_adapters_generate_with_casts(tmp_path):
    """PEFT's `generate` calls the model inside, past the outermost forward."""
    model, reference = lora().eval(), lora().eval()
    trained(model, "hmp-o1", tmp_path, max_steps=1, learning_rate=0.0)
    ways = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    got = model.eval().generate(input_ids=BATCHES[0], **ways)
    hmpx.restore()
    plain = reference.generate(input_ids=BATCHES[0], **ways)
    with hmpx.convert():
        expected = reference.generate(input_ids=BATCHES[0], **ways)
    assert torch.equal(got.scores[0], expected.scores[0].float()) and not torch.equal(got.scores[0], plain.scores[0])


WIDE = {**NO_DROPOUT, "n_embd": 32}  # with parameters of 4096 elements, from which on state is held in 8 bits
EIGHT_BITS = ["bitsandbytes", "torchao"]


@pytest.fixture
def torchao_steps_eagerly():
    """It compiles its step, which takes longer than the rest of the test."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("library", EIGHT_BITS)
@pytest.mark.parametrize("way", ["stochastic", "master"])
def test_an_8_bit_optimizer_steps_bf16_weights(library, way, tmp_path, torchao_steps_eagerly):
    """In a Trainer, by `optimizers=`; by hand it works on FP32 copies."""
    module = pytest.importorskip(f"{library}.optim", reason=f"{library} is not installed, or does not run here")

    def make(params):
        return module.AdamW8bit(list(params), lr=1e-2, weight_decay=0.0)

    model = gpt2(**WIDE)
    optimizer = make(model.parameters())
    trainer = trained(model, RECIPES[way], tmp_path, optimizers=(optimizer, None), max_grad_norm=0.0)
    expected = trained_by_hand(gpt2(**WIDE), way, make)
    assert bits(model) == bits(expected) and model.dtype is torch.bfloat16
    kept = [v for values in trainer.optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    assert any(getattr(v, "codes", v).dtype is torch.uint8 for v in kept)
