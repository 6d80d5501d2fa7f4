"""No false alarms: `hmpx.compare` on models that train well under the default lists and under torch.autocast's."""

import math

import pytest
import torch
from torch import nn

import hmpx
from examples import charlm, digits


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, 2, batch_first=True, dropout=0.2), nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def random_batches(*shape):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator), torch.randint(5, shape[:1], generator=generator)) for _ in range(4)
    ]


def classify(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def character_transformer():
    train, _, characters = charlm.load_text()
    generator = torch.Generator().manual_seed(0)
    return (
        charlm.CharTransformer(characters),
        [charlm.batch(train, generator) for _ in range(4)],
        charlm.loss_of,
    )


def conv_net():
    images, labels = digits.load()
    body = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *body, nn.Flatten(), nn.Linear(128, 10))
    return model, [(images[i : i + 64], labels[i : i + 64]) for i in range(0, 256, 64)], classify


MODELS = {
    "character transformer": character_transformer,
    "conv net": conv_net,
    "TransformerEncoder": lambda: (Encoder(), random_batches(16, 10, 32), classify),
    "LSTM": lambda: (Recurrent(), random_batches(16, 10, 16), classify),
}


@pytest.mark.parametrize("lists", [None, "autocast-cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_is_called_healthy(name, lists):
    torch.manual_seed(0)
    model, batches, loss = MODELS[name]()
    found = hmpx.compare(model, batches, loss, lists=lists)
    assert not found.is_broken and not found.broken, str(found)
    assert "healthy" in str(found) and found.gradient_error < 0.08
    compared = [row for row in found.rows if row.error]
    assert compared and all(row.error < 0.01 and math.isfinite(row.loss_change) for row in compared)
    assert not any(row.note for row in found.rows)
