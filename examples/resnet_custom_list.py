"""A ResNet-50 with the op list that the HMP guide gives for it, beside FP32 and the default lists, in a minute.

``python examples/resnet_custom_list.py``. The lists are those of the guide, which ship as ``oplists/resnet50``; with
``--bf16 mine.txt --fp32 mine32.txt`` yours take their place. The network has ResNet-50's sixteen bottleneck blocks, an
eighth as wide, and learns scikit-learn's images of digits. What hmpx does to it is one line, `hmpx.convert`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import HELD_BACK, accuracy, load
from torch import Tensor, nn

import hmpx

LISTS = Path(hmpx.__file__).parent / "oplists" / "resnet50"
WIDTH, BLOCKS, SIZE = 8, (3, 4, 6, 3), 32


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = F.relu(self.norm2(self.conv2(out)))
        return F.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    channels = WIDTH
    for stage, count in enumerate(BLOCKS):
        for i in range(count):
            width = WIDTH * 2**stage
            layers.append(Bottleneck(channels, width, stride=2 if stage and i == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def train(name: str, steps: int) -> float:
    """The accuracy on images that were held back."""
    torch.manual_seed(0)
    images, labels = load(SIZE)
    model = resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(labels) - HELD_BACK, (32,), generator=generator)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"\r{name:30} step {step:3}/{steps}  loss {loss.item():.3f} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return accuracy(model.eval(), images, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bf16", default=str(LISTS / "bf16.txt"), metavar="FILE", help="default oplists/resnet50")
    parser.add_argument("--fp32", default=str(LISTS / "fp32.txt"), metavar="FILE", help="default oplists/resnet50")
    options = parser.parse_args()
    ways = {
        "FP32": contextlib.nullcontext,
        "HMP's default lists": hmpx.convert,
        "the custom lists": lambda: hmpx.convert(bf16_file_path=options.bf16, fp32_file_path=options.fp32),
    }
    for name, around in ways.items():
        started = time.perf_counter()
        with around():
            reached = train(name, options.steps)
        print(f"{name:30} accuracy {reached:.3f}  {time.perf_counter() - started:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
