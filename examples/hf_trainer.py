"""transformers' Trainer under a recipe: one callback. A small GPT-2 on English text, resumed half-way, in a minute.

``python examples/hf_trainer.py``, or with ``--recipe``, any other recipe or file. The model is made from a
configuration, the text comes with Python (`pydoc`): nothing is downloaded. It trains without a break, then again from
the checkpoint in the middle, and prints a hash of the weights of both.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hmpx.integrations.transformers import HmpxCallback

CONTEXT = 64


def load() -> tuple[list[dict], list[dict], int]:
    """Pieces of text as characters, for training and for validation, and how many different ones there are."""
    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    pieces = torch.tensor([alphabet[character] for character in text]).split(CONTEXT)[:-1]
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    return rows[:-256], rows[-256:], len(alphabet)


def made(options: argparse.Namespace, folder: Path) -> Trainer:
    """A Trainer as anybody would write it; the callback is all that hmpx wants."""
    training, validation, characters = load()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=characters, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0
        )
    )
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=options.steps, per_device_train_batch_size=16, learning_rate=1e-3,
        warmup_steps=20, save_strategy="steps", save_steps=options.steps // 2, logging_steps=20, report_to=[],
        use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [HmpxCallback(options.recipe)]
    return Trainer(model, arguments, train_dataset=training, eval_dataset=validation, callbacks=callbacks)


def hash_of(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="neuron-bf16-sr", help="a recipe's name or file; default neuron-bf16-sr")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unbroken = made(options, folder)
        unbroken.train()
        resumed = made(options, folder)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{options.steps // 2}"))
        for way, trainer in (("without a break", unbroken), ("resumed half-way", resumed)):
            loss, model = trainer.evaluate()["eval_loss"], trainer.model
            print(f"{options.recipe}, {way:16}: validation loss {loss:.3f}, {model.dtype}, weights {hash_of(model)}")


if __name__ == "__main__":
    main()
