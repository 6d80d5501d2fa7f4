"""What doctor says that everything is in, and what `--expect` says that has changed, of small trainings."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.errors import HmpxError
from hmpx.insight.doctor import examined
from hmpx.insight.precision import Precision, PrecisionRow, read_table

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """One parameter of each kind but routers."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.body, self.lm_head = nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.to(dtype)

    def forward(self, tokens):
        return self.lm_head(self.norm(torch.relu(self.body(self.embed(tokens)))))


def tokens(seed):
    return torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed, autocast=None):
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        out = model(tokens(seed))
    return nn.functional.cross_entropy(out.float().flatten(0, 1), tokens(seed).flatten().roll(1))


def train(model, optimizer=None, steps=4, passes=1, autocast=None, expected=None, seed=0, before=None, after=None):
    """Return what doctor finds of a loop; before, after: run around each step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    with examined(None, (), expected=expected) as found:
        for step in range(steps):
            model.zero_grad()
            for part in range(passes):
                loss_of(model, seed + passes * step + part, autocast).backward()
            if before is not None:
                before()
            optimizer.step()
            if after is not None:
                after()
    assert not [each for each in found.not_checked if "raised" in each], found.not_checked
    return found


def cells(found, *names):
    """Return for each parameter the cells of these names."""
    return {row.name: tuple(getattr(row, name) for name in names) for row in found.precision.rows}


WIDE = {"exp_avg": "float32", "exp_avg_sq": "float32"}
NAMES = ("embed.weight", "norm.weight", "norm.bias", "body.weight", "body.bias", "lm_head.weight")


def test_autocast_computes_products_in_bf16_and_the_rest_in_fp32():
    found = train(Net(), autocast=BF16)
    low = ("float32", "bfloat16", "float32", WIDE, "none", True)
    high = ("float32", "float32", *low[2:])
    wanted = dict.fromkeys(NAMES, high) | dict.fromkeys(("body.weight", "body.bias", "lm_head.weight"), low)
    assert cells(found, "stored", "computed", "gradient", "state", "master", "moved") == wanted
    assert found.precision.beside == {
        "buffers": "1 float32", "loss": "float32", "autocast": "cpu bfloat16 (4 of 4 products)",
    }  # fmt: skip
    kinds = [row.kind for row in found.precision.rows]
    assert kinds == ["embeddings", "<norms>", "<norms>", "rest", "rest", "<head>"]


def test_the_table_is_printed_first_with_a_row_for_each_kind(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert str(train(Net(), autocast=BF16)).splitlines()[:6] == [
        "            n  weights  stored  computed  gradient  state    master  moves",
        "embeddings  1      320  fp32    fp32      fp32      2x fp32  none      yes",
        "<norms>     2       32  fp32    fp32      fp32      2x fp32  none      yes",
        "<head>      1      320  fp32    bf16      fp32      2x fp32  none      yes",
        "rest        2      272  fp32    bf16      fp32      2x fp32  none      yes",
        "buffers 1 fp32; loss fp32; autocast cpu bf16 (4 of 4 products)",
    ]


def test_the_page_has_the_table_and_its_rows_open_to_names(tmp_path):
    found = train(Net(), autocast=BF16)
    (grid,) = [each.as_page() for each in found._sections() if getattr(each, "page", "")]
    assert grid["head"] == "What everything is in" and grid["rows"][3][-1] == ["body.weight", "body.bias"]
    assert [row[0] for row in grid["rows"]] == ["embeddings", "<norms>", "<head>", "rest"]
    found.html(tmp_path / "found.html")
    assert "What everything is in" in (tmp_path / "found.html").read_text(encoding="utf-8")


def test_ten_rows_are_printed_and_all_if_asked_for(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = train(Net())
    found.precision.rows += [PrecisionRow(f"other.{i}", "rest", 1, f"float{i}") for i in range(9)]
    lines = str(found).splitlines()
    assert lines[11] == "… and 3 more rows of 3 parameters: --all-rows"
    found.all_rows = True
    lines = str(found).splitlines()
    assert lines[14].startswith("loss") or lines[14].startswith("buffers"), lines
    assert all(len(line) <= 100 for line in lines)


def test_gradients_of_two_passes_are_added_up_in_their_dtype():
    found = train(Net(BF16), passes=2)
    assert {*map(str, cells(found, "gradient", "summed").values())} == {"('bfloat16', {'add': 'bfloat16'})"}
    assert all(row.kept is not None for row in found.precision.rows)
    assert not any(row.summed for row in train(Net(BF16)).precision.rows)  # of one pass there is no sum


def test_masters_by_hand_belong_to_the_weights_that_they_fill():
    found = train(*by_hand(Net(BF16)))
    assert {*map(str, cells(found, "stored", "computed", "gradient", "master", "moved").values())} == {
        "('bfloat16', 'bfloat16', 'bfloat16', 'float32 by hand', True)"
    }
    assert [*cells(found)] == [*NAMES] and found.precision.rows[0].state["exp_avg"] == "float32"
    assert found.status == 0, str(found)  # the weights move, though no step moves them


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("bf16-sr", ("bfloat16", "bfloat16", {"exp_avg": "float32", "exp_avg_sq": "float32"}, "none")),
        (
            "neuron-bf16-fp32-params-copy",
            ("bfloat16", "bfloat16", {"exp_avg": "float32", "exp_avg_sq": "float32"}, "float32 hmpx"),
        ),
        ("lean8", ("bfloat16", "freed", {"exp_avg": "8bit", "exp_avg_sq": "8bit"}, "none")),
    ],
)
def test_a_recipe_says_what_it_holds(recipe, wanted):
    model = Net()
    model, optimizer = hmpx.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), recipe)
    found = cells(train(model, optimizer), "stored", "gradient", "state", "master", "computed")
    hmpx.restore(optimizer)
    assert found["body.weight"] == (*wanted, "bfloat16"), found
    assert found["norm.weight"][-1] == "float32"


def test_what_is_frozen_unused_or_unseen_says_so():
    model = Net()
    model.unused = nn.Linear(4, 4)
    model.embed.weight.requires_grad_(False)
    found = cells(train(model), "computed", "gradient", "moved")
    assert found["embed.weight"] == ("float32", "frozen", None)
    assert found["unused.weight"] == ("not used", "none", False)
    early = cells(train(Net(), steps=2), "computed", "gradient")  # the first iteration is looked at
    assert {*early.values()} == {("float32", "float32")}


class Teaching(nn.Module):
    """A student, and a teacher in BF16 that runs without gradients."""

    def __init__(self):
        super().__init__()
        self.student = Net()
        self.__dict__["teacher"] = Net(BF16)  # no module of this one

    def forward(self, tokens):
        with torch.no_grad():
            target = self.teacher(tokens)
        return self.student(tokens) + 0 * target


def test_a_nan_that_stays_does_not_move():
    model = Net()
    model.norm.bias.data.fill_(torch.nan)
    found = train(model, torch.optim.SGD([*model.body.parameters(), model.norm.bias], 0.0))
    assert cells(found, "moved")["norm.bias"] == (False,)


def test_another_model_that_runs_without_gradients_has_rows():
    found = cells(train(Teaching()), "stored", "computed")
    assert found["Teaching.student.body.weight"] == ("float32", "float32")
    assert found["Net.body.weight"] == ("bfloat16", "bfloat16")


class Again(torch.autograd.Function):
    """Computes without gradients, and again in the backward pass, outside of autocast."""

    @staticmethod
    def forward(ctx, x, body, *parameters):
        ctx.body = body
        ctx.save_for_backward(x)
        return body(x).float()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.body(x := x.detach().requires_grad_())
        own = [*ctx.body.parameters()]
        of_x, *rest = torch.autograd.grad(out, [x, *own], gradient)
        return of_x, None, *rest


class Adjoint(Net):
    def forward(self, tokens):
        return self.lm_head(self.norm(Again.apply(self.embed(tokens), self.body, *self.body.parameters())))


def test_what_a_function_computes_in_its_forward_and_again_in_its_backward_has_both_dtypes():
    found = cells(train(Adjoint(), autocast=BF16), "computed")
    assert found["body.weight"] == ("bfloat16 and float32",)
    assert found["lm_head.weight"] == ("bfloat16",)


def test_a_row_is_told_by_no_number_of_a_layer():
    names = ("layers.0.weight", "head.1.weight", "scale")
    rows = [PrecisionRow(name, "rest", 1, "float32" if "." in name else "bfloat16") for name in names]
    lines = Precision(rows).lines(100)
    assert [line.split()[:2] for line in lines[1:]] == [["rest", "weight"], ["rest", "scale"]]
    rows[1].name = "head.1.bias"
    assert "layers.*.weight +1" in Precision(rows).lines(100)[1]


def test_codes_are_named_by_their_class_and_computed_in_what_they_are_decoded_to():
    class Coded(nn.Parameter):
        pass

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Coded(torch.randint(0, 255, (16, 16), dtype=torch.uint8), requires_grad=False)
            self.lora = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return nn.functional.linear(x, torch.ops.sheet_tests.dequantize(self.weight)) + self.lora(x).to(x.dtype)

    with torch.library._scoped_library("sheet_tests", "FRAGMENT") as library:
        library.define("dequantize(Tensor codes) -> Tensor")
        library.impl("dequantize", lambda codes: (codes.float() / 255).to(BF16), "CompositeExplicitAutograd")
        model = Net()
        model.body = Base()
        hook = model.body.register_forward_pre_hook(lambda _, given: (given[0].to(BF16),))
        model.body.lora.to(BF16)
        model.norm.to(BF16), model.lm_head.to(BF16)
        found = cells(train(model), "stored", "computed", "gradient")
        hook.remove()
    assert found["body.weight"] == ("Coded", "bfloat16", "frozen"), found


# What has changed


def by_hand(model):
    """Return a model, an optimizer of FP32 masters of it, and what copies between them, as `train` takes it."""
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]

    def give():
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()

    @torch.no_grad()
    def take():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)

    return model, torch.optim.AdamW(masters, 1e-2), 4, 1, None, None, 0, give, take


def auto_dtype(is_lost, **more):
    """A loader takes the dtype of the checkpoint where it took FP32."""
    checkpoint = Net(BF16).state_dict()
    model = Net(BF16 if is_lost else FP32)
    model.load_state_dict(checkpoint)
    return train(model, **more)


def idle_upcast(is_lost, **more):
    """Trainable weights were made FP32 before the optimizer; now the result of the cast is thrown away."""
    model = Net(BF16)
    for p in model.parameters():
        if is_lost:
            p.float()
        else:
            p.data = p.data.float()
    return train(model, autocast=BF16, **more)


class Momentum(torch.optim.Optimizer):
    """Keeps its momentum in BF16, and leaves loading to torch, which casts it to the dtype of the weights."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = state.get("momentum", torch.zeros_like(p, dtype=BF16)).mul_(0.9).add_(p.grad)
                p.sub_(state["momentum"], alpha=group["lr"])


def wide_state(is_lost, **more):
    """A resume casts the optimizer's state."""
    model = Net()
    optimizer = Momentum(model.parameters())
    if is_lost:
        loss_of(model, 0).backward()
        optimizer.step()
        saved, optimizer = optimizer.state_dict(), Momentum(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(saved))
    return train(model, optimizer, **more)


def lost_grad_dtype(is_lost, **more):
    """Gradients of BF16 weights were to be FP32; a deep copy has forgotten it."""
    model = Net(BF16)
    for p in model.parameters():
        p.grad_dtype = FP32
    if is_lost:
        model = copy.deepcopy(model)
    return train(model, torch.optim.SGD(model.parameters(), 0.1), **more)


def still_norms(is_lost, **more):
    """Norms, at 1.0, that were in FP32 are in BF16 as all else is, where small updates are lost."""
    model = Net(BF16)
    model.norm.to(BF16 if is_lost else FP32)
    model.norm.register_forward_pre_hook(lambda norm, given: (given[0].to(norm.weight.dtype),))
    model.norm.register_forward_hook(lambda *call: call[-1].to(BF16))
    return train(model, torch.optim.Adam(model.parameters(), 1e-4), **more)


def no_masters(is_lost, **more):
    """One backend steps FP32 masters, another the BF16 weights themselves."""
    model = Net(BF16)
    if is_lost:
        return train(model, torch.optim.AdamW(model.parameters(), 1e-5), **more)
    model, optimizer, *_, before, after = by_hand(model)
    optimizer.param_groups[0]["lr"] = 1e-5
    return train(model, optimizer, before=before, after=after, **more)


def held(found):
    return json.loads(json.dumps(found.precision.as_json()))


def said(found):
    return [each.said for each in found.findings if each.kind == "expected"]


@pytest.mark.parametrize(
    ("case", "first"),
    [
        (auto_dtype, "stored bf16 now, fp32 before; so is computed bf16, gradient bf16, state exp_avg bf16"),
        (idle_upcast, "stored bf16 now, fp32 before; so is "),
        (wide_state, "state momentum fp32 now, bf16 before: 6 parameters (embed.weight, norm.weight, norm.bias and"),
        (lost_grad_dtype, "gradient bf16 now, fp32 before: 6 parameters"),
        (still_norms, "stored bf16 now, fp32 before; so is computed bf16, gradient bf16, state exp_avg bf16"),
        (no_masters, "state exp_avg bf16 now, fp32 before; so is state exp_avg_sq bf16, master none, moves less than"),
    ],
)
def test_what_is_in_another_dtype_than_before_is_wrong(case, first):
    torch.manual_seed(0)
    before = held(case(False, steps=6))
    torch.manual_seed(1)
    assert said(case(False, steps=3, expected=before, seed=50)) == []
    found = case(True, steps=3, expected=before)
    assert found.status == 1 and said(found)[0].startswith(first), said(found)
    assert len(said(found)) <= 2, said(found)  # what follows from one cause is one finding
    if case is still_norms:
        assert {name for each in found.findings if each.kind == "expected" for name in each.names} == {
            "norm.weight", "norm.bias",
        }  # fmt: skip


def test_what_is_gone_or_new_or_beside_parameters_is_told():
    before = held(train(Net(), autocast=BF16))
    model = Net()
    model.other = nn.Linear(2, 2)
    assert said(train(model, expected=before)) == [
        "new: 2 parameters (other.weight, other.bias)",
        "computed fp32 now, bf16 before: 3 parameters (body.weight, body.bias, lm_head.weight)",
        "autocast none now, bf16 before",
    ]


def test_a_file_without_a_table_is_refused(tmp_path):
    for text in (
        "",
        "[]",
        '{"findings": []}',
        '{"precision": {"rows": []}}',
        '{"precision": {"rows": [{"name": "a"}]}}',
    ):
        (tmp_path / "old.json").write_text(text)
        with pytest.raises(HmpxError, match="--expect takes what doctor --json"):
            read_table(tmp_path / "old.json")


# Nothing has changed


class Mixture(nn.Module):
    """Experts, of which some get no token in some steps."""

    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Embedding(20, 16), nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 20) for _ in range(8))

    def forward(self, tokens):
        x = self.embed(tokens)
        weight, chosen = self.gate(x).softmax(-1).topk(1)
        out = torch.zeros(*tokens.shape, 20)
        for i, expert in enumerate(self.experts):
            here = (chosen == i).any(-1)
            if here.any():
                out[here] = (expert(x[here]) * weight[here]).to(out.dtype)
        return out


class Checkpointed(Net):
    def forward(self, tokens):
        return self.lm_head(
            checkpoint(lambda x: self.norm(torch.relu(self.body(x))), self.embed(tokens), use_reentrant=False)
        )


class Adapted(Net):
    """LoRA by hand, on a base in BF16."""

    def __init__(self):
        super().__init__(BF16)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(self.norm(self.body(x) + self.up(self.down(x.float())).to(x.dtype)))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.lm_head.weight = self.embed.weight


def prepared(recipe):
    def run(**more):
        model = Net()
        model, optimizer = hmpx.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), recipe)
        found = train(model, optimizer, **more)
        hmpx.restore(optimizer)
        return found

    return run


def averaged(**more):
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return train(model, after=lambda: average.update_parameters(model), **more)


def clipped(**more):
    model = Net(BF16)
    return train(model, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1), passes=2, **more)


def evaluated(**more):
    model = Net()
    return train(model, after=lambda: loss_of(model.eval(), 3).item(), autocast=BF16, **more)


def masters(**more):
    model, optimizer, *_, before, after = by_hand(Net(BF16))
    return train(model, optimizer, before=before, after=after, **more)


def optimized(kind, **options):
    def run(**more):
        model = Net()
        return train(model, kind(model.parameters(), **options), **more)

    return run


HEALTHY = {
    "FP32": lambda **more: train(Net(), **more),
    "FP32, accumulated": lambda **more: train(Net(), passes=2, **more),
    "FP64": lambda **more: train(Net(torch.float64), **more),
    "SGD": optimized(torch.optim.SGD, lr=0.1),
    "SGD, momentum": optimized(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": optimized(torch.optim.Adafactor),
    "foreach": optimized(torch.optim.AdamW, lr=1e-2, foreach=True),
    "autocast": lambda **more: train(Net(), autocast=BF16, **more),
    "autocast, accumulated": lambda **more: train(Net(), autocast=BF16, passes=3, **more),
    "autocast, evaluated": evaluated,
    "checkpointed": lambda **more: train(Checkpointed(), autocast=BF16, **more),
    "tied": lambda **more: train(Tied(), autocast=BF16, **more),
    "experts": lambda **more: train(Mixture(), **more),
    "LoRA": lambda **more: train(Adapted(), **more),
    "teacher": lambda **more: train(Teaching(), **more),
    "average": averaged,
    "BF16, clipped": clipped,
    "BF16, masters": masters,
    "bf16-sr": prepared("bf16-sr"),
    "neuron-bf16-fp32-params-copy": prepared("neuron-bf16-fp32-params-copy"),
    "lean8": prepared("lean8"),
}


def test_a_healthy_training_is_as_it_was_before():
    for name, run in HEALTHY.items():
        torch.manual_seed(0)
        before = held(run(steps=6))
        torch.manual_seed(1)
        for steps in (3, 8):
            assert (name, steps, said(run(steps=steps, expected=before, seed=90))) == (name, steps, [])
