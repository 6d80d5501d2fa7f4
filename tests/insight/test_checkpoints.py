"""What one or two checkpoints tell, read in every form, against trainings of which it is known."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as sharded
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn import functional as F

import hmpx
from hmpx.insight.checkpoints import tensors
from hmpx.insight.checkpoints.files import checkup
from hmpx.insight.checkpoints.tensors import matched, movement, opened, ulp
from hmpx.shell.main import main

BF16 = torch.bfloat16


def weights(seed=0, dtype=BF16):
    """Two matrices whose weights lie in many binades, a norm at 1.0 and a bias."""
    torch.manual_seed(seed)
    found = {name: torch.randn(64, 64) * 0.1 for name in ("up.weight", "down.weight")}
    found |= {"norm.weight": torch.ones(64), "norm.bias": torch.randn(64) * 0.01}
    return {name: each.to(dtype) for name, each in found.items()}


def moved(before, way=5e-3, lost=False, seed=1):
    """The same, each weight moved by about `way`; if updates are `lost`, by a tenth, and only where that is an ulp."""
    torch.manual_seed(seed)
    after, way = {}, way / 10 if lost else way
    for name, each in before.items():
        steps = way * (1 + 0.3 * torch.randn(each.shape)) * torch.randn(each.shape).sign()
        steps *= (steps.abs() >= ulp(each.float(), BF16)) if lost else 1
        after[name] = (each.float() + steps).to(each.dtype)
    return after


@pytest.fixture
def files(tmp_path):
    """Save two checkpoints, and look at them."""

    def look(before, after=None, **more):
        paths = [tmp_path / name for name in ("before.pt", "after.pt")]
        for path, each in zip(paths, (before, after), strict=True):
            torch.save(each, path)
        return checkup(str(paths[0]), str(paths[1]) if after is not None else None, **more)

    return look


def said(found):
    """What it prints, wherever lines end."""
    return " ".join(str(found).split())


def kinds(found):
    return [(each.kind, each.wrong) for each in found.findings]


# ---- what is read


def _as_safetensors(held, path):
    save_file(held, path / "model.safetensors")
    return path / "model.safetensors"


def _as_shards(held, path):
    first, *rest = held
    save_file({first: held[first]}, path / "a.safetensors")
    save_file({name: held[name] for name in rest}, path / "b.safetensors")
    names = {name: "a.safetensors" if name == first else "b.safetensors" for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def _as_saved(held, path):
    torch.save(held, path / "model.pt")
    return path / "model.pt"


def _as_old_format(held, path):
    torch.save(held, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return path


def _as_distributed(held, path):
    sharded.save({**held, "optim.state.up.weight.exp_avg": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    return path


FORMS = [_as_safetensors, _as_shards, _as_saved, _as_old_format, _as_distributed]


@pytest.mark.parametrize("save", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_every_form_gives_dtypes_shapes_and_rows(save, tmp_path):
    held = {**weights(), "cube": torch.randn(5, 3, 2).half(), "scale": torch.tensor(0.5), "ids": torch.arange(4)}
    held["mask"] = torch.ones(3, 3, dtype=torch.bool).tril()
    found = opened(str(save(held, tmp_path))).weights
    assert found.keys() == held.keys()
    for name, each in held.items():
        assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
        whole = len(each) if each.dim() else 1
        assert torch.equal(found[name].rows(0, whole), each)
        if whole > 1:
            assert torch.equal(found[name].rows(1, 3), each[1:3])


def test_weights_and_state_inside_of_dicts_and_beside_files(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "best": optimizer.state_dict(), "step": 3}, tmp_path / "all.pt")
    found = opened(str(tmp_path / "all.pt"))
    assert {*found.weights} == {"model.weight", "model.bias"}
    assert {name.rpartition(".")[2] for name in found.state} == {"exp_avg", "exp_avg_sq", "step"}
    (tmp_path / "run").mkdir()
    _as_safetensors(model.state_dict(), tmp_path / "run")
    torch.save(optimizer.state_dict(), tmp_path / "run" / "optimizer.pt")
    found = opened(str(tmp_path / "run"))
    assert {*found.weights} == {"weight", "bias"} and len(found.state) == 6


@pytest.mark.parametrize(
    "before, after, pairs",
    [
        (["a.w", "b.w"], ["_orig_mod.a.w", "_orig_mod.b.w"], 2),
        (["a.w", "b.w"], ["module.a.w", "module.b.w"], 2),
        (["a.w", "b.w"], ["model._orig_mod.a.w", "model._orig_mod.b.w"], 2),
        (["model.a.w", "head.w"], ["model.a.w", "head.w"], 2),
        (["a.w", "b.w"], ["a.w", "b.v"], 1),
        (["a.w", "b.w"], ["model.a.w", "model.b.w", "gen", "ema.decay"], 2),
        (["model.a.w", "model.b.w", "lm_head.w"], ["state.base.a.w", "state.base.b.w", "state.head.w"], 2),
        (["w"], ["w"], 1),
    ],
)
def test_names_are_matched(before, after, pairs):
    found = matched(before, after)
    assert len(found) == pairs
    assert all(new[-3:] == old[-3:] for new, old in found.items())


class _Own:
    pass


def test_what_cannot_be_read_is_said(tmp_path):
    def fails(name, said):
        with pytest.raises(hmpx.HmpxError, match=said):
            checkup(str(tmp_path / name))

    fails("none.pt", "there is no such file")
    (tmp_path / "text.pt").write_text("no")
    fails("text.pt", "text.pt")
    (tmp_path / "text.safetensors").write_text("no")
    fails("text.safetensors", "cannot be read")
    torch.save(_Own(), tmp_path / "own.pt")
    fails("own.pt", "weights_only")
    torch.save({"step": 3}, tmp_path / "empty.pt")
    fails("empty.pt", "no tensors")
    (tmp_path / "folder").mkdir()
    fails("folder", "no weights in this folder")
    (tmp_path / "folder" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    fails("folder", "gone.safetensors: there is no such file, but its index names it")
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "a.pt")
    torch.save({"b": torch.ones(2, 2)}, tmp_path / "b.pt")
    with pytest.raises(hmpx.HmpxError, match=r"no tensor has one name in both: a in .*a\.pt; b in .*b\.pt"):
        checkup(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))


def _noting(sizes, see):
    def noted(numbers, part):
        sizes.append(part.numel())
        see(numbers, part)

    return noted


def test_parts_tell_what_the_whole_does(files, monkeypatch):
    """A few rows at a time, and no more."""
    before = weights()
    after = moved(before, lost=True)
    after["up.weight"][63, 63] = math.nan
    whole = files(before, after)
    monkeypatch.setattr(tensors, "_PART", 640)
    sizes = []
    monkeypatch.setattr(tensors.Numbers, "see", _noting(sizes, tensors.Numbers.see))
    parts = files(before, after)
    assert kinds(parts) == kinds(whole) == [("not finite", True), ("lost updates", True), ("norms", False)]
    assert parts.kept == pytest.approx(whole.kept) and max(sizes) == 640


# ---- what movement tells


def test_kept_of_two_sizes_by_hand():
    """Of 640 weights 64 are small and move by 3/256; the others have ulps of 1/128, and a third of them does."""
    before = torch.full((10, 64), 1.25)
    before[0] = 2.0**-8
    after = before + 3 / 256
    found = movement(before, after.bfloat16().float(), BF16)
    assert found.expected == pytest.approx(64 * 3 / 256 + 576 * 2 / 128) and found.kept == pytest.approx(1)
    after[1:, 21:] = 1.25
    found = movement(before, after.bfloat16().float(), BF16)
    assert found.kept == pytest.approx((64 * 3 / 256 + 9 * 21 * 2 / 128) / (64 * 3 / 256 + 576 * 2 / 128))


def test_rows_that_stood_aside_do_not_count():
    before = torch.randn(100, 64).bfloat16()
    after = (before.float() + 0.01).bfloat16()
    after[20:] = before[20:]
    found = movement(before.float(), after.float(), BF16)
    assert found.still_rows == pytest.approx(0.8) and found.count == 20 * 64 and found.kept > 0.95


TEXTS = torch.randint(40, (400, 17), generator=torch.Generator().manual_seed(0)).cumsum(1) % 40


def _net():
    layers = [nn.Embedding(40, 32), nn.Flatten(), nn.Linear(512, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 40)]
    return nn.Sequential(*layers)


def _trained(model, way, steps=60, rate=2e-4):
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=rate)
    if way in ("stochastic", "master"):
        hmpx.attach(optimizer, way)
    for i in range(steps):
        batch = TEXTS[(i * 32) % 384 :][:32]
        F.cross_entropy(model(batch[:, :-1]).float(), batch[:, -1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
def test_trainings_that_lose_updates_and_trainings_that_do_not(files):
    torch.manual_seed(0)
    base = _trained(_net(), "float32", 100, 2e-3)
    for way in ("nearest", "stochastic", "master"):
        model = _net().bfloat16()
        model.load_state_dict(base)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        found = files(before, _trained(model, way))
        assert found.status == (1 if way == "nearest" else 0), (way, str(found))
        assert found.kept < 0.75 if way == "nearest" else found.kept > 0.95


# ---- what is said


def test_lost_updates_are_wrong_and_healthy_ones_are_not(files):
    before = weights()
    found = files(before, moved(before, lost=True))
    assert kinds(found) == [("lost updates", True), ("norms", False)] and found.status == 1
    assert "bfloat16 weights moved" in said(found) and "as far as float32 weights would have" in said(found)
    assert "norm.weight" in said(found) and "0.0039" in said(found)
    found = files(before, moved(before))
    assert not found.findings and not found.not_checked and found.status == 0 and found.kept > 0.95


def test_a_quarter_of_the_weights_that_keeps_less_than_half_is_wrong(files):
    """Of these only the smallest move; the others move ten times as far, so that all together keep more than 0.9."""
    for rows, status in ((15, 0), (16, 1), (17, 1)):
        before = {"few": torch.randn(rows, 512).bfloat16() * 0.01, "all": torch.randn(64 - rows, 512).bfloat16() * 0.1}
        few, after = moved({"few": before["few"]}, way=5e-4)["few"], moved(before)
        found = files(before, {**after, "few": torch.where(before["few"].abs() < 0.002, few, before["few"])})
        assert found.kept > 0.9 and found.status == status, (rows, str(found))


def test_a_norm_that_cannot_show_its_movement_is_no_finding(files):
    """By 1e-3 a norm at 1.0 moves in FP32, and no file in BF16 shows it."""
    before = {name: each for name, each in weights().items() if name != "norm.bias"}
    before |= {"last.weight": torch.ones(64, dtype=BF16)}
    found = files(before, moved(before, way=1e-3))
    assert not found.findings and found.status == 0, str(found)
    after = {**moved(before, way=0.02), "last.weight": before["last.weight"]}
    found = files(before, after)
    assert kinds(found) == [("norms", False)] and "1 of 2 vectors did not move" in said(found)


def test_numbers_in_float32_that_are_bfloat16_s_are_judged_as_such(files):
    before = weights()
    after = {name: each.float() for name, each in moved(before, lost=True).items()}
    found = files(before, after)
    assert {"lost updates", "float32 in name", "dtypes"} <= {kind for kind, _ in kinds(found)}
    assert "bfloat16 weights moved" in said(found)
    exact = weights(dtype=torch.float32)
    found = files(exact, {name: each + 1e-4 * torch.randn(each.shape) for name, each in exact.items()})
    assert not found.findings and not found.not_checked and math.isnan(found.kept)  # FP32 loses none


def test_numbers_of_float32_that_were_never_in_low_precision_are_not_judged(files):
    """Masks, bins and codes are multiples of one number; SGD moves large weights less: their gradients are small."""
    beside = {"a.weight": torch.randn(32, 32), "norm.weight": torch.ones(300)}
    triangle = torch.full((64, 64), -math.inf).triu(1)  # which is added to scores
    codes = torch.tril(torch.ones(64, 64)), torch.arange(256.0).repeat(2) / 8, torch.randn(32, 32).sign(), triangle
    for buffer in codes:
        assert not files({**beside, "mask": buffer}).findings
    assert kinds(files({**beside, "a.weight": torch.randn(32, 32).bfloat16().float()}))  # of a BF16 training
    broken = [torch.full((8,), -math.inf), triangle + 1, -triangle, triangle.log()]
    assert all(files({**beside, "mask": each}).wrong for each in broken)
    sizes = torch.logspace(-3, 1, 64)[:, None]
    before = {"a.weight": sizes * torch.randn(64, 64)}
    found = files(before, {"a.weight": before["a.weight"] + 1e-4 / sizes * torch.randn(64, 64)})
    assert not found.wrong and found.status == 0, str(found)


def test_float32_before_and_bfloat16_after_is_said(files):
    before = weights(dtype=torch.float32)
    after = moved({name: each.bfloat16() for name, each in before.items()})
    found = files(before, after)
    assert kinds(found) == [("dtypes", False)] and "4 of 4 tensors were float32 and are bfloat16" in said(found)
    assert found.kept > 0.95


def test_one_checkpoint_alone(files):
    held = weights()
    found = files(held)
    assert kinds(found) == [("norms", False)] and "1 norm stands at 1.0" in said(found) and found.status == 0
    assert "one file does not tell whether updates were lost" in said(found)
    held["up.weight"][0, 0] = math.inf
    found = files({name: each.float() for name, each in held.items()})
    assert kinds(found) == [("not finite", True), ("float32 in name", False), ("norms", False)] and found.status == 1


def test_a_rate_says_which_steps_are_lost(files):
    before = weights()
    found = files(before, rate=1e-5)
    share = (ulp(torch.cat([before["up.weight"], before["down.weight"]]).float(), BF16) / 2 > 1e-5).float().mean()
    assert f"half an ulp of {100 * share:.1f} %" in said(found) and ("small steps", False) in kinds(found)
    found = files(before, moved(before), rate=1e-5, steps=100)
    assert "small steps" not in str(
        found
    ) and "the smallest weights moved 0.0052; 100 steps of 1e-05 in one direction are 0.001" in said(found)


def test_state_of_an_optimizer(files):
    held = weights()
    state = {"state": {0: {"exp_avg_sq": torch.ones(64, 64, dtype=BF16), "hmpx_master": torch.ones(64, 64)}}}
    found = files({"model": held, "optimizer": {**state, "param_groups": []}})
    assert "with FP32 master weights" in said(found) and ("optimizer state", False) in kinds(found)
    assert "exp_avg_sq in bfloat16" in said(found)


@pytest.mark.parametrize("how", ["as it is", "in float32", "stochastically"])
def test_state_that_is_kept_as_advised_is_none_to_be_mended(how, tmp_path):
    """Of `torch.save` and of a folder of torch.distributed.checkpoint, with the keys that this writes."""
    model = nn.Linear(64, 64).to(BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    if how != "as it is":
        hmpx.attach(optimizer, state_dtype=BF16 if how == "stochastically" else torch.float32)
    model(torch.randn(8, 64, dtype=BF16)).float().square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    sharded.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "folder", no_dist=True)
    for path in ("all.pt", "folder"):
        found = checkup(str(tmp_path / path))
        told = [each.do for each in found.findings if each.kind == "optimizer state"]
        assert len(told) == (how == "as it is"), str(found)
        assert all("float32" in do and "hmpx.attach(optimizer, state_dtype=torch.bfloat16)" in do for do in told)


# ---- what cannot be told


def changed(before, change):
    """Each tensor as `change` makes it of its numbers before and after."""
    after = moved(before)
    return {name: change(each, after[name]) for name, each in before.items()}


UNTOLD = {  # what is said: the checkpoint after
    "pruned": lambda before: changed(before, lambda old, new: new * (torch.rand(new.shape) > 0.3)),
    "as those of another training": lambda before: weights(seed=5),
    "rows that did not move (87.5 % of up.weight)": lambda before: changed(
        before, lambda old, new: torch.cat([new[:8], old[8:]])
    ),
    "the updates of adapters": lambda before: changed(before, lambda old, new: new if old.dim() > 1 else old),
    "tensors whose shape has changed (up.weight": lambda before: changed(before, lambda old, new: new[:32]),
    "weights in 8 bits or fewer": lambda before: changed(
        before, lambda old, new: old.to(torch.int8) if old.dim() > 1 else old
    ),
    "weights in 8 bits or fewer (up.scale)": lambda before: {
        **moved(before),
        "up.scale": torch.ones(4).to(torch.float8_e8m0fnu),
    },
    "fewer than 256 weights moved": lambda before: changed(
        before, lambda old, new: torch.cat([old[:1] + 0.01, old[1:]]) if old.dim() > 1 else old
    ),
    "1 tensor only in ": lambda before: {**moved(before), "lora_A": torch.ones(2, 64)},
    "no number moved": dict,
}


@pytest.mark.parametrize("reason", UNTOLD)
def test_what_cannot_be_told_is_not_checked(reason, files):
    before = weights()
    found = files(before, UNTOLD[reason](before))
    assert found.status == 2 and not found.wrong, str(found)
    assert any(reason in each for each in found.not_checked), found.not_checked


def test_weights_of_one_size_tell_nothing(files):
    before = {"a": torch.full((32, 32), 1.25, dtype=BF16)}
    found = files(before, {"a": before["a"] + 0.0625})
    assert found.status == 2 and "of one size" in said(found) and math.isnan(found.kept)


# ---- the command


def test_the_command(tmp_path, monkeypatch, capsys):
    before = weights()
    torch.save(before, tmp_path / "before.pt")
    save_file(moved(before, lost=True), tmp_path / "after.safetensors")
    monkeypatch.chdir(tmp_path)

    def doctor(*arguments):
        return main(["doctor", *arguments]), *capsys.readouterr()

    status, out, err = doctor("--files", "before.pt", "after.safetensors", "--json", "a.json", "--html", "a.html")
    assert status == 1 and "WRONG  lost updates" in out and not err
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["wrong"] and 0 < found["kept"] < 0.9 and found["tensors"].keys() == {"up.weight", "down.weight"}
    assert "up.weight" in (tmp_path / "a.html").read_text()
    assert doctor("--files", "before.pt")[0] == 0
    assert doctor("--files", "before.pt", "before.pt")[0] == 2
    for arguments, said in (
        (("--files", "none.pt"), "none.pt: there is no such file or folder"),
        (("--files", "before.pt", "before.pt", "before.pt"), "one or two"),
        (("--files", "before.pt", "--fix", "recipe.yaml"), "--fix needs a script"),
        (("--lr", "1", "train.py"), "--lr and --trained-steps go with --files"),
    ):
        status, out, err = doctor(*arguments)
        assert status == 2 and said in err, (arguments, err)
    with pytest.raises(SystemExit):
        doctor()
    assert "SCRIPT" in capsys.readouterr().err
