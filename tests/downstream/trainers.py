"""Lightning, transformers' Trainer and Accelerate, asked for the same things in the same words.

Each has `fit`, which gives a model and its optimizer after eight steps; `resumed`, which gives them of an unbroken run
and of one that goes on from a checkpoint of its middle; and `by_hand`, the model of the same steps in a loop.
`how` is "", "compiled", or "recomputing" for activation checkpointing; `clip` is a word of `CLIPS`.
"""

import accelerate
import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.utils import clip_grad_value_
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.integrations.lightning import HmpxPrecision
from tests.downstream import trainer
from tests.downstream.by_hand import ByHand, adamw, batches, clip_norm, loader, net
from tests.downstream.lightning_net import Net

CLIPS = {
    "": lambda params: None,
    "norm": lambda params: clip_norm(params, 0.1),
    "value": lambda params: clip_grad_value_(params, 0.01),
}
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


def lightning_trainer(plugin=None, **more):
    """A Trainer under a plugin, or one that is made of a recipe."""
    if plugin is not None and not isinstance(plugin, pl.plugins.Precision):
        plugin = HmpxPrecision(plugin)
    return pl.Trainer(plugins=plugin, **{"accelerator": "cpu", "max_epochs": 1, **QUIET, **more})


def scheduled(model):
    optimizer = adamw(model.parameters())
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Recomputing(Net):
    """Its forward pass runs again in backward, outside of the forward context."""

    def training_step(self, batch, index):
        inputs, targets = batch
        logits = checkpoint(self.net, inputs.requires_grad_(), use_reentrant=False)
        return nn.functional.cross_entropy(logits, targets)


class SavedAt(pl.Callback):
    """Saves a checkpoint at one step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class Lightning:
    prefix = "net."

    def fit(self, recipe, folder, accumulate=1, clip="", how=""):
        model = Recomputing() if how == "recomputing" else Net()
        clipping = {"norm": (0.1, "norm"), "value": (0.01, "value"), "": (None, None)}[clip]
        asked = dict(zip(("gradient_clip_val", "gradient_clip_algorithm"), clipping, strict=True))
        run = lightning_trainer(recipe, accumulate_grad_batches=accumulate, **asked)
        run.fit(torch.compile(model, backend="aot_eager") if how == "compiled" else model, loader())
        return model.net, run.optimizers[0]

    def resumed(self, recipe, folder):
        for how, path in (({"callbacks": [SavedAt(8, folder / "middle.ckpt")]}, None), ({}, folder / "middle.ckpt")):
            model, run = Net(scheduled), lightning_trainer(recipe, max_epochs=4, **how)
            run.fit(model, loader(4), ckpt_path=path)
            assert run.global_step == 16
            yield model, run.optimizers[0]

    def by_hand(self, way, accumulate=1, clip=""):
        hand = ByHand(net(), way, prefix=self.prefix)
        return hand.train(batches(), accumulate=accumulate, clip=CLIPS[clip]).model


class Transformers:
    def fit(self, recipe, folder, accumulate=1, clip="", how=""):
        compiling = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        asked = {"": {}, "compiled": compiling, "recomputing": {"activation_checkpointing": True}}[how]
        asked |= {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0.1 * bool(clip), "weight_decay": 0.0}
        run = trainer.trained(trainer.gpt2(**trainer.NO_DROPOUT), recipe, folder, **asked)
        return run.model, run.optimizer

    def resumed(self, recipe, folder):
        """Dropout, a schedule and accumulation included."""
        how = {
            "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear",
            "train_sampling_strategy": "random",
        }  # fmt: skip
        for path in (None, str(folder / "checkpoint-4")):
            run = trainer.trained(trainer.gpt2(), recipe, folder, resume=path, **how)
            yield run.model, run.optimizer

    def by_hand(self, way, accumulate=1, clip=""):
        return trainer.by_hand(way, lambda params: adamw(params, weight_decay=0.0), accumulate, 0.1 * bool(clip))


class Accelerate:
    """A plain loop; `when`: whether `hmpx.prepare` comes before `accelerator.prepare` or after it."""

    def __init__(self, when):
        self.when = when

    def made(self, recipe, **asked):
        accelerate.state.AcceleratorState._reset_state(True)
        self.accelerator, model = accelerate.Accelerator(cpu=True, **asked), net()
        optimizer = adamw(model.parameters())
        if recipe is not None and self.when == "before":
            hmpx.prepare(model, optimizer, recipe)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if recipe is not None and self.when == "after":
            got = hmpx.prepare(self.model, self.optimizer, recipe)
            assert got[0] is self.model and got[1] is self.optimizer
        return self

    def train(self, data, clip=""):
        for inputs, targets in data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(inputs), targets))
                if self.accelerator.sync_gradients and clip:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return getattr(self.model, "_orig_mod", self.model), self.optimizer

    def fit(self, recipe, folder, accumulate=1, clip="", how=""):
        backend = {"dynamo_backend": "aot_eager"} if how == "compiled" else {}
        return self.made(recipe, gradient_accumulation_steps=accumulate, **backend).train(batches(), clip)

    def resumed(self, recipe, folder):
        self.made(recipe).train(batches()[:4])
        self.accelerator.save_state(str(folder))
        yield self.train(batches()[4:])
        self.made(recipe).accelerator.load_state(str(folder))
        yield self.train(batches()[4:])

    def by_hand(self, way, accumulate=1, clip=""):
        return ByHand(net(), way).train(batches(), accumulate=accumulate, clip=CLIPS[clip]).model


TRAINERS = {
    "lightning": Lightning(),
    "transformers": Transformers(),
    "accelerate, before": Accelerate("before"),
    "accelerate, after": Accelerate("after"),
}
