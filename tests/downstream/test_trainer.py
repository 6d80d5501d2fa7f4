"""`HmpxCallback` in the hands of transformers' Trainer: what this one alone has; `test_trainers` has the rest."""

import copy
import logging
import pickle

import pytest
import torch
from transformers import Adafactor, T5Config, T5ForConditionalGeneration, Trainer

import hmpx
from hmpx.integrations.transformers import HmpxCallback
from tests.downstream.by_hand import AUTOCASTS, RECIPES, bits
from tests.downstream.trainer import NO_DROPOUT, arguments, by_hand, gpt2, texts, trained

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


class Subclass(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _adafactor(params):
    return Adafactor(params, lr=1e-2, scale_parameter=False, relative_step=False)


@pytest.mark.parametrize("made", ["optimizers=", "subclass", "adafactor"])
def test_whatever_makes_the_optimizer(made, tmp_path):
    model = gpt2(**NO_DROPOUT)
    how = {
        "optimizers=": {"optimizers": (_sgd(model.parameters()), None)},
        "subclass": {"cls": Subclass},
        "adafactor": {"optim": "adafactor", "weight_decay": 0.0},
    }
    trained(model, RECIPES["stochastic"], tmp_path, max_grad_norm=0.0, **how[made])
    assert bits(model) == bits(by_hand("stochastic", _adafactor if made == "adafactor" else _sgd))


def test_bf16_models_train_and_a_model_that_is_made_late_and_a_callback_that_is_added_late(tmp_path):
    expected = trained(gpt2(**NO_DROPOUT), RECIPES["stochastic"], tmp_path).model
    late = trained(None, RECIPES["stochastic"], tmp_path, model_init=lambda: gpt2(**NO_DROPOUT)).model
    trainer = Trainer(gpt2(**NO_DROPOUT).bfloat16(), arguments(tmp_path), train_dataset=texts())
    trainer.add_callback(HmpxCallback(RECIPES["stochastic"]))
    trainer.train()
    assert bits(expected) == bits(late) == bits(trainer.model)


def test_the_same_trainer_resumes_too(tmp_path):
    model = gpt2()
    trainer = trained(model, RECIPES["master"], tmp_path, save_strategy="steps", save_steps=4)
    unbroken = bits(model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert bits(model) == unbroken


def test_masters_that_a_checkpoint_does_not_hold_are_missed(tmp_path, caplog):
    recipe, how = {**AUTOCASTS, "weights": "master"}, {"save_strategy": "steps", "save_steps": 4}
    trained(gpt2(), recipe, tmp_path, **how)
    with caplog.at_level(logging.WARNING, "hmpx"):
        trained(gpt2(), recipe, tmp_path, resume=str(tmp_path / "checkpoint-4"), **how)
    assert "the checkpoint has no masters" in caplog.text


def test_evaluate_and_predict_before_during_and_after(tmp_path):
    """The loss of an evaluation by hand under autocast."""
    model, data = gpt2(**NO_DROPOUT), texts(4)
    trainer = Trainer(model, arguments(tmp_path), eval_dataset=data, callbacks=[HmpxCallback(RECIPES["FP32 weights"])])
    before = trainer.evaluate()["eval_loss"]
    whole, of_trainer = torch.stack([text["input_ids"] for text in data]), {"num_items_in_batch": torch.tensor(48)}
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False), torch.no_grad():
        expected = gpt2(**NO_DROPOUT).eval()(input_ids=whole, labels=whole, **of_trainer)
    assert before == expected.loss.item()
    logits = torch.from_numpy(trainer.predict(data).predictions)
    assert expected.logits.dtype is BF16
    assert logits.dtype is torch.float32 and torch.equal(logits, expected.logits.float())
    trainer.train_dataset = texts()
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after != before
    direct = model.eval()(input_ids=whole, labels=whole, **of_trainer)
    assert direct.loss.item() == after and direct.logits.dtype is BF16
    assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32  # outside of the model


def t5():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def test_generate_has_the_tokens_and_scores_of_a_conversion_by_hand(tmp_path):
    """Also of an encoder, which `generate` calls by itself, before the model."""
    ways = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    inputs = torch.stack([text["input_ids"] for text in texts(2)])
    for make in (gpt2, t5):
        model, reference = make().eval(), make().eval()
        Trainer(model, arguments(tmp_path), callbacks=[HmpxCallback("hmp-o1")])
        got = model.generate(inputs, **ways)
        hmpx.restore()
        plain = reference.generate(inputs, **ways)
        with hmpx.convert():
            expected = reference.generate(inputs, **ways)
        assert not torch.equal(plain.scores[0], expected.scores[0])
        assert torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(got.scores, expected.scores, strict=True))


def test_copies_and_pickles_of_the_model_are_taken(tmp_path):
    """As for a moving average of the weights: a copy is cast too, and knows nothing of the original."""
    model = gpt2(**NO_DROPOUT)
    trained(model, RECIPES["stochastic"], tmp_path)
    inputs = texts(1)[0]["input_ids"][None]
    expected = model.eval()(inputs).logits
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(copied(inputs).logits, expected)
    assert pickle.loads(pickle.dumps(copied))(inputs).logits.dtype is BF16


def test_a_trainer_without_a_recipe_keeps_its_weights_and_its_optimizer(tmp_path):
    """Beside one that has a recipe, which is restored before the other one trains, for ops are cast in every model."""
    plain = bits(trained(gpt2(**NO_DROPOUT), None, tmp_path).model)
    trainers = [
        Trainer(gpt2(**NO_DROPOUT), arguments(tmp_path), train_dataset=texts(), callbacks=callbacks)
        for callbacks in ([HmpxCallback(RECIPES["stochastic"])], [])
    ]
    trainers[0].train()
    trainers[1].create_optimizer()
    assert trainers[1].model.dtype is torch.float32 and hmpx.updates.attach.attached(trainers[1].optimizer) is None
    hmpx.restore()
    trainers[1].train()
    assert bits(trainers[1].model) == plain


def test_state_in_8_bits_with_the_clipping_that_a_trainer_has(tmp_path):
    """By the recipe, and by its key over another: the loss is that of FP32, which lean8 names where it cannot go."""

    def loss(recipe, **keys):
        callbacks = [HmpxCallback(recipe, **keys)] if recipe else []
        trainer = trained(gpt2(**NO_DROPOUT), None, tmp_path, callbacks=callbacks, max_steps=24)
        coded = any(values.dtype is torch.uint8 for values in trainer.optimizer.state_dict()["state"][0].values())
        assert coded == bool(recipe)
        hmpx.restore()
        return trainer.model.float()(input_ids=whole, labels=whole).loss.item()

    whole = torch.stack([text["input_ids"] for text in texts()])
    expected, found = loss(None), loss("bf16-sr-8bit")
    assert found == loss("bf16-sr", state_dtype="8bit") == pytest.approx(expected, rel=0.01)
    with pytest.raises(hmpx.HmpxError, match="bf16-sr-8bit has 8-bit state, as lean8"):
        trained(gpt2(**NO_DROPOUT), "lean8", tmp_path, max_grad_norm=0)


def test_two_recipes_are_refused(tmp_path):
    both = [HmpxCallback("hmp-o1"), HmpxCallback("hmp-o2")]
    with pytest.raises(hmpx.HmpxError, match="another recipe is in force, of a second plugin or of a trainer that was"):
        Trainer(gpt2(), arguments(tmp_path), callbacks=both)
    hmpx.restore()
    with hmpx.activate("hmp-o1"), pytest.raises(hmpx.HmpxError, match="take one of the two"):
        Trainer(gpt2(), arguments(tmp_path), callbacks=both[:1])
    with pytest.raises(hmpx.HmpxError, match="did you mean 'hmp-o1'"):
        HmpxCallback("hmp-01")


def test_a_model_goes_from_one_trainer_to_the_next(tmp_path):
    model = gpt2(**NO_DROPOUT)
    for way in ("stochastic", "master"):
        trained(model, {**AUTOCASTS, "weights": way}, tmp_path)
        hmpx.restore()
