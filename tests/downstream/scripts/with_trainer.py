"""A plain run of transformers' Trainer that knows nothing of hmpx."""

import tempfile

import torch
import torchvision_ops  # noqa: F401  transformers imports torchvision
from report import report
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
)
texts, labels = torch.randint(3, 40, (32, 12)), torch.randint(2, (32,))
data = [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=10, per_device_train_batch_size=8, learning_rate=5e-3, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
report(model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
