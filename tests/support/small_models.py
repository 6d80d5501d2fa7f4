"""Small models of the kinds that people train, with batches and a loss; each trains well in BF16."""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, bias=False)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 5)

    def forward(self, x):
        y = self.layers(x)
        return self.head(y.mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, x):
        y = self.lstm(x)[0]
        return self.head(y[:, -1])


def random_batches(*shape, number=6):
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=draw), torch.randint(5, shape[:1], generator=draw)) for _ in range(number)]


def classify(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def character_transformer(dropout):
    from examples import charlm  # takes a second, with all that it imports

    train, _, characters = charlm.load_text()
    generator = torch.Generator().manual_seed(0)
    batches = [charlm.batch(train, generator) for _ in range(4)]
    return charlm.CharTransformer(characters), batches, charlm.loss_of


def conv_net(dropout):
    from examples import digits

    images, labels = digits.load()
    body = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *body, nn.Flatten(), nn.Linear(128, 10))
    return model, [(images[i : i + 64], labels[i : i + 64]) for i in range(0, 384, 64)], classify


MODELS = {  # by the rate of dropout
    "character transformer": character_transformer,
    "conv net": conv_net,
    "TransformerEncoder": lambda dropout: (Encoder(dropout), random_batches(16, 10, 32), classify),
    "LSTM": lambda dropout: (Recurrent(), random_batches(16, 10, 16), classify),
}
