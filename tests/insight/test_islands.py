"""What record, explain and the verbose log say of regions of torch.autocast, and of positions in low precision."""

import torch
from torch import nn

import hmpx
from tests.support.old_llama import OldLlama, old_llama


class Angles(nn.Module):
    """As in the newest transformers: positions times frequencies, in no region."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, positions):
        return positions[:, None].float() * self.inv_freq


region = torch.autocast


def summed(x):
    with region(x.device.type, enabled=False):
        return x.sum()


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = OldLlama().rotary, OldLlama().rotary

    @torch.cuda.amp.autocast(False)
    def decode(self, x):
        with torch.autocast("cpu"), torch.autocast("cpu", dtype=torch.float32):
            return summed(x)

    def cast(self, x):
        with torch.autocast("cpu", cache_enabled=False), torch.autocast("cpu", torch.bfloat16, True, False):
            return torch.amp.custom_fwd(summed, device_type="cpu", cast_inputs=None)(x)


def test_explain_of_a_recipe_with_a_model_names_the_lines_that_are_left_alone(capsys):
    hmpx.explain("autocast-cuda", Several())
    lines = [line for line in capsys.readouterr().out.splitlines() if "torch.autocast(enabled=False) at" in line]
    assert lines[0].startswith("left alone   ") and [line.rpartition(": ")[2] for line in lines] == [
        *["Several"] * 3,
        "a, b",
    ]
    assert "old_llama.py:" in lines[3] and " of Rotary: " in lines[3] and all("test_islands.py" in x for x in lines[:3])
    hmpx.explain("autocast-cuda", nn.Linear(2, 2))
    assert "left alone" not in capsys.readouterr().out


def test_record_names_the_line_of_the_region():
    model, ids = old_llama()
    with hmpx.activate("autocast-cuda"), hmpx.record() as log:
        model(ids)
    (product,) = [site for site in log.sites if site.op == "matmul" and site.module == "rotary"]
    assert product.given == product.seen and not product.rule
    assert "left alone: in torch.autocast(enabled=False) at " in product.reason and "old_llama.py:" in product.reason


def test_positions_that_a_list_rounds_are_named_by_their_values_and_by_the_rule(caplog, capsys):
    caplog.set_level("INFO", "hmpx")
    cases = [
        (400, True, hmpx.convert),
        (255, False, hmpx.convert),
        (400, False, lambda **_: hmpx.activate("autocast-cuda")),
    ]
    for last, named, around in cases:
        caplog.clear()
        with around(isVerbose=True), hmpx.record() as log:
            Angles()(torch.arange(last + 1))
        said = [site.positions for site in log.sites if site.positions]
        assert said == ["positions above 256 in bfloat16, up to 400"] * named, last
        assert ("positions above 256" in str(log)) is named
        assert ("mul rounds positions above 256" in caplog.text) is (around is hmpx.convert)
    hmpx.explain("hmp-o1")
    assert "positions    mul rounds positions above 256" in capsys.readouterr().out
    hmpx.explain("autocast-cuda")
    assert "mul rounds" not in capsys.readouterr().out
