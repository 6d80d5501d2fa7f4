"""A tiny GPT-2 under transformers' Trainer, and the same steps in a loop by hand."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hmpx.integrations.transformers import HmpxCallback
from tests.downstream.by_hand import ByHand, adamw, clip_norm

TINY = {
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def gpt2(**more):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**TINY, "activation_function": "gelu", **more}))


def texts(count=32):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": text, "labels": text} for text in torch.randint(3, 40, (count, 12), generator=generator)]


def arguments(folder, cls=TrainingArguments, **more):
    plain = {
        "lr_scheduler_type": "constant", "learning_rate": 1e-2, "weight_decay": 0.1, "optim": "adamw_torch",
        "train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True, "save_strategy": "no"}
    return cls(output_dir=str(folder), **{"max_steps": 8, **plain, **quiet, "dataloader_pin_memory": False, **more})


def trained(model, recipe, folder, resume=None, cls=Trainer, data=None, **more):
    """A Trainer that has trained."""
    of_trainer = {key: more.pop(key) for key in ("optimizers", "callbacks", "model_init") if key in more}
    of_trainer.setdefault("callbacks", [HmpxCallback(recipe)] if recipe is not None else [])
    trainer = cls(model, arguments(folder, **more), train_dataset=data or texts(), **of_trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def by_hand(way, optimizer=adamw, accumulate=1, clip=0.0, steps=8):
    """The same steps without Trainer, which divides the sum over a step's tokens by the number of labels."""
    data = [text["input_ids"] for text in texts()]
    batches = [torch.stack(data[i : i + 4]) for i in range(0, len(data), 4)] * 4
    tokens = torch.tensor(4 * 12 * accumulate)

    def loss_of(model, batch):  # which `train` divides by `accumulate`
        return model(input_ids=batch, labels=batch, num_items_in_batch=tokens).loss * accumulate

    clips = (lambda params: clip_norm(params, clip)) if clip else (lambda params: None)
    run = ByHand(gpt2(**NO_DROPOUT), way, optimizer)
    return run.train(batches[: steps * accumulate], accumulate=accumulate, clip=clips, loss_of=loss_of).model
