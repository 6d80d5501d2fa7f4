"""A plain Lightning fit that knows nothing of hmpx."""

import torchvision_ops  # noqa: F401  Lightning's metrics import torchvision

# isort: split
import lightning
import torch
from report import report


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        self.losses = []

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
report(model, model.losses)
