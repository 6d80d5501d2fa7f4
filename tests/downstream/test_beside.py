"""Libraries that people train with beside a framework, on tiny models from configs.

PEFT, bitsandbytes and torchao have the bits of a loop by hand; TRL and sentence-transformers train as in FP32.
"""

import copy

import peft
import pytest
import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import optim

import hmpx
from hmpx.integrations.transformers import HmpxCallback
from hmpx.ops import outside_model
from tests.downstream.by_hand import AUTOCASTS, RECIPES, ByHand, bits, digest, state_bits
from tests.downstream.trainer import NO_DROPOUT, gpt2, texts, trained

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16
BATCHES = [torch.stack([text["input_ids"] for text in texts()[i : i + 4]]) for i in range(0, 32, 4)]


def lora(dtype=torch.float32, **more):
    """Adapters on the attention of a frozen base; both their matrices have values, so that both get gradients."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], init_lora_weights=False, **more)
    model = gpt2(**NO_DROPOUT).to(dtype)
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


def _of_layers(model, *calls):
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for call in calls:
                getattr(layer, call)()
    return model


def _mixed(model):
    model.add_adapter("two", peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights="pissa"))
    model.add_weighted_adapter(["default", "two"], [0.7, 0.4], "mix", combination_type="svd")
    return model


MERGES = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "safe": lambda model: model.merge_and_unload(safe_merge=True),
    "merge_adapter": lambda model: model.merge_adapter() or model,
    "unmerge_adapter": lambda model: model.merge_adapter() or model.unmerge_adapter() or model,
    "layer": lambda model: _of_layers(model, "merge"),  # as diffusers' fuse_lora does
    "layer and back": lambda model: _of_layers(model, "merge", "unmerge"),
    "new and weighted adapters": _mixed,
}


@pytest.mark.parametrize("where", ["model", "everywhere"])
def test_merged_weights_and_new_adapters_have_the_bits_that_they_have_without_hmpx(where):
    models = [
        (name, dora, lora(use_dora=dora)) for dora in (False, True) for name in MERGES if not (dora and "new" in name)
    ]
    plain = copy.deepcopy(models)
    with hmpx.convert(where=where):
        for (name, dora, ours), (*_, theirs) in zip(models, plain, strict=True):
            found = bits(MERGES[name](ours))
            with hmpx.disable_casts():
                assert found == bits(MERGES[name](theirs)), (name, dora)


def test_every_place_of_peft_exists():
    places = outside_model.places()
    for name in places["peft"]:
        assert list(outside_model.functions_in("peft", {**places, "peft": [name]})), name


WIDE = {**NO_DROPOUT, "n_embd": 32}  # with parameters of 4096 elements, from which on state is held in 8 bits


@pytest.fixture
def torchao_steps_eagerly():
    """It compiles its step, which takes longer than the rest of the test."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("library, way", [("bitsandbytes", "stochastic"), ("torchao", "master")])
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
    ours, theirs = lora(BF16), lora(BF16)
    optimizers = [optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (ours, theirs)]
    expected = _losses(theirs, optimizers[1], autocast=True)
    hmpx.prepare(ours, optimizers[0], {**AUTOCASTS, "parameter_dtype": "float32"})
    assert _losses(ours, optimizers[0]) == expected
    assert {p.dtype for p in ours.parameters() if not p.requires_grad} == {BF16}
    assert bits(ours) == bits(theirs)


QUIET = {
    "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4,
    "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True, "save_strategy": "no",
    "dataloader_pin_memory": False, "gradient_checkpointing": False, "seed": 3, "max_length": 12,
}  # fmt: skip


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


MORE_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("DPO", "KTO")]


@pytest.mark.parametrize("kind", ["SFT", "GRPO", *MORE_KINDS])
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


def test_trls_own_bf16_trains_by_the_lists(tmp_path):
    """SFTConfig enables torch.autocast by itself; its regions are the recipe's."""
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
