"""`convert()` and `run` beside the libraries themselves, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parent / "scripts")  # has what torchvision asks of torch when it is imported
IMPORTS = {
    "transformers": "from transformers import AutoModel",
    "transformers.Trainer": "from transformers import Trainer",
    "diffusers": "import diffusers; from diffusers import UNet2DModel",
    "timm": "import timm; timm.create_model('resnet18')",
    "lightning": "import lightning",
    "accelerate": "from accelerate import Accelerator",
}
CHECK = """
import sys; sys.path.insert(0, {!r}); import torchvision_ops
import torch, torch.nn.functional as F
gelu = F.gelu
{}
import hmpx
with hmpx.convert() as handle:
    assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.bfloat16
    handle.escaped
assert F.gelu is gelu and torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32
"""


@pytest.mark.parametrize("library", IMPORTS)
def test_beside_real_libraries(library):
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(SCRIPTS, IMPORTS[library])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_script_that_imports_trainer_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torchvision_ops\nfrom transformers import Trainer\nprint('imported', Trainer.__name__)\n")
    command = [sys.executable, "-m", "hmpx", "run", "--recipe", "neuron-bf16-sr", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SCRIPTS})
    assert "imported Trainer" in done.stdout, done.stderr[-2000:]
