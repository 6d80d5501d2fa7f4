"""`<head>`, `<norms>` and `<last 15%>` in `modules`, and the recipes that have them."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hmpx
from hmpx.recipes.reading import read_recipe, recipe_names
from tests.support import python, ranks
from tests.support.same import same

BF16, FP32 = torch.bfloat16, torch.float32
WORDS, WIDTH = 22, 8


class Decoder(nn.Module):
    def __init__(self, tied, head="lm_head"):
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.mid = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.called = head
        setattr(self, head, nn.Linear(WIDTH, WORDS, bias=False))
        if tied:
            getattr(self, head).weight = self.tokens.weight

    def forward(self, ids):
        return getattr(self, self.called)(F.gelu(self.mid(self.tokens(ids))))


class Says(Decoder):
    """Its head has no name that anybody could guess."""

    def __init__(self):
        super().__init__(tied=False, head="to_words")
        self.output = nn.Linear(2, 2)

    def get_output_embeddings(self):
        return self.to_words


class SaysNone(Decoder):
    def get_output_embeddings(self):
        raise NotImplementedError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.output(x)


class Layered(nn.Module):
    """Each layer has an `output`, which is no head; and the model may have one."""

    def __init__(self, **head):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        for name, module in head.items():
            setattr(self, name, module)


def data():
    generator = torch.Generator().manual_seed(9)
    return torch.randint(WORDS, (2, 3, 6), generator=generator)


def by_hand(tied, low=False):
    """Logits, loss and gradients of BF16 weights: everything in BF16 but the head and the loss; `low`: but the loss."""
    model = Decoder(tied).bfloat16()
    ids, targets = data()
    x = F.gelu(F.linear(F.embedding(ids, model.tokens.weight), model.mid.weight, model.mid.bias))
    logits = F.linear(x, model.lm_head.weight) if low else F.linear(x.float(), model.lm_head.weight.float())
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    return [logits.detach(), loss.detach(), *(p.grad for p in model.parameters())]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(how, recipe, tied, sharded=False, head="lm_head"):
    """The same as `by_hand` of a script that knows nothing of precision, by `prepare` or `activate`."""
    ids, targets = data()

    def distributed(model):
        for part in (model.mid, model) if sharded else ():
            fully_shard(part)
        return model

    if how == "activate":
        hmpx.activate(recipe)
        model = distributed(Decoder(tied, head))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
    else:
        model = distributed(Decoder(tied, head).bfloat16())
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        hmpx.prepare(model, optimizer, recipe)
    assert {p.dtype for p in model.parameters()} == {BF16}
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    found = [logits.detach(), loss.detach(), *(whole(p.grad) for p in model.parameters())]
    optimizer.step()
    hmpx.restore()
    return found


@pytest.mark.parametrize(("how", "tied"), [("prepare", False), ("activate", True)])
def test_the_head_and_the_loss_are_those_of_fp32_by_hand(how, tied):
    expected, low = by_hand(tied), by_hand(tied, low=True)
    found = trained(how, "fp32-head", tied)
    assert found[0].dtype is found[1].dtype is FP32 and same(found, expected)
    assert same(trained(how, "neuron-bf16-sr", tied), low) and not torch.equal(low[1], expected[1])


@pytest.mark.parametrize(
    "head, tied", [("head", False), ("output", False), ("embed_out", False), ("of_any_name", True)]
)
def test_the_head_is_found_by_its_name_or_by_its_tie(head, tied):
    assert same(trained("prepare", "fp32-head", tied, head=head), by_hand(tied))


def _sharded(rank, how):
    return [[t.tolist() for t in trained(how, "fp32-head", tied, sharded=True)] for tied in (True, False)]


@pytest.mark.parametrize("how", ["prepare", pytest.param("activate", marks=pytest.mark.slow)])
def test_under_fsdp2_the_head_is_that_of_fp32_by_hand(how):
    expected = [[t.tolist() for t in by_hand(tied)] for tied in (True, False)]
    assert ranks.run(2, _sharded, how) == [expected, expected]  # each rank has the same batch


def wrapping(model, wrap):
    model.lm_head = wrap(model.lm_head)
    return model


def ruled(model, recipe="fp32-head"):
    """The names of the innermost modules that a recipe gives a rule."""
    hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), recipe)
    given = {name: module for name, module in model.named_modules() if hmpx.policies_of(module)}
    found = {name for name, module in given.items() if not any(map(hmpx.policies_of, module.children()))}
    hmpx.restore()
    return found


class Policies(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.reference, self.head = Decoder(True), Decoder(False), nn.Linear(WIDTH, 1)


class OwnNorm(nn.Module):
    """torch's RMS norm, written out: no op list knows it as a norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.7, WIDTH))

    def forward(self, x):
        return x * (x * x).mean(-1, keepdim=True).add(1e-3) ** -0.5 * self.weight


class PreNorm(nn.Module):
    """A norm, and the layer behind it, which is none."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = OwnNorm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.norm(x))


class Router(nn.Module):
    """Knows its experts by a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return torch.topk(F.linear(x, self.weight), 2)[1]


class Mixture(nn.Module):
    """Chooses by what a layer of an odd name says, which no role fits; its `gate` is a large matrix of an MLP."""

    def __init__(self):
        super().__init__()
        self.chooser, self.gate, self.down = nn.Linear(32, 4), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(F.silu(self.gate(x))) * self.chooser(x).argsort(-1)[..., :1]


FIND_ROUTERS = {"fp8": ["linear"], "modules": {"<routers>": {"fp8": []}}}
BOTH = {"extends": "fp32-head", "modules": {"<norms>": "fp32"}}
FOUND = [  # a recipe, a model, and the modules that get a rule
    ("fp32-head", lambda: Says(), {"to_words"}),
    ("fp32-head", lambda: nn.ModuleDict({"inside": Says(), "head": nn.Linear(2, 2)}), {"inside.to_words"}),
    ("fp32-head", lambda: SaysNone(tied=False), {"lm_head"}),
    ("fp32-head", lambda: torch.compile(Decoder(tied=False)), {"_orig_mod.lm_head"}),
    ("fp32-head", lambda: Layered(output=nn.Linear(2, 2)), {"output"}),
    ("fp32-head", lambda: Layered(head=nn.Linear(2, 2), embed_out=nn.Linear(2, 2)), {"head"}),
    ("fp32-head", lambda: Layered(part=nn.ModuleDict({"head": nn.Linear(2, 2)})), {"part.head"}),
    ("fp32-head", lambda: nn.ModuleList([Decoder(False, "lm_head"), Decoder(False, "to_words")]), {"0.lm_head"}),
    ("fp32-head", lambda: nn.ModuleDict({"a": Decoder(False), "b": Decoder(False)}), {"a.lm_head", "b.lm_head"}),
    ("fp32-head", lambda: wrapping(Decoder(False), checkpoint_wrapper), {"lm_head._checkpoint_wrapped_module"}),
    ("fp32-head", lambda: wrapping(Decoder(False), torch.compile), {"lm_head._orig_mod"}),
    ("fp32-head", lambda: Policies(), {"policy.lm_head"}),  # a tie says more than a name
    ("bf16-norms-fp32", lambda: PreNorm(), {"norm"}),
    (BOTH, lambda: nn.ModuleDict({"norm": nn.LayerNorm(4), "mid": nn.Linear(4, 4), "head": nn.Linear(4, 4)}),
     {"norm", "head"}),
    (FIND_ROUTERS, lambda: nn.ModuleDict({"a": nn.ModuleDict({
        "gate": nn.Linear(32, 8), "gate_proj": nn.Linear(32, 8), "shared_gate": nn.Linear(32, 1),
     })}), {"a.gate", "a.shared_gate"}),
    (FIND_ROUTERS, lambda: nn.ModuleDict({
        "b": Router(), "c": Mixture(), "router": nn.Sequential(nn.Linear(32, 8)), "gate": nn.Linear(32, 32),
     }), {"b", "router"}),
]  # fmt: skip


def test_which_modules_have_a_role():
    assert [ruled(model(), recipe) for recipe, model, _ in FOUND] == [names for _, _, names in FOUND]


def _wrapped(rank):
    by_name = {"parameter_dtype": "float32", "modules": {"lm_head": "fp32"}}
    low, wide = Decoder(tied=False).bfloat16(), Decoder(tied=False)
    return [ruled(DistributedDataParallel(low)), ruled(DistributedDataParallel(wide), by_name)]


def test_the_head_of_a_wrapped_model_and_a_name_without_what_is_around_it():
    assert ranks.run(1, _wrapped) == [[{"module.lm_head"}] * 2]


LOOKED_FOR = [  # a recipe, a model without such modules, and what is said
    ("fp32-head", lambda: nn.Sequential(nn.Linear(2, 2)),
     "fp32-head.yaml:8: modules: '<head>' is no module of Sequential: looked for what get_out.* lm_head, head, output "
     "or embed_out; write the name of the module"),
    ("fp32-head", Layered, "'<head>' is no module of Layered"),  # it is in every layer
    ("bf16-norms-fp32", lambda: Decoder(True), "'<norms>' is no module of Decoder: looked for .* 'Norm' in its name"),
    ("torchao-nvfp4", lambda: Decoder(False), "'<last 15%>' is no module of Decoder: looked for a ModuleList"),
    (FIND_ROUTERS, lambda: nn.Linear(4, 4), "'<routers>' is no module of Linear: looked for modules called gate or"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "make", "said"), LOOKED_FOR)
def test_a_model_without_the_role_is_told_what_was_looked_for(recipe, make, said):
    model = make()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(hmpx.HmpxError, match=said):
        hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), recipe)
    assert same([*model.parameters()], before) and all(p.dtype is FP32 for p in model.parameters())
    with hmpx.activate(recipe), pytest.raises(hmpx.HmpxError, match=said):
        optim.SGD(model.parameters(), lr=0.1)


def test_a_rule_of_ones_own_comes_after_that_of_the_recipe_and_is_the_one_that_decides():
    model = Decoder(tied=False)
    own = {"extends": "fp32-head", "modules": {"lm_head": {"bf16": ["linear"]}}}
    hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), own)
    assert model(data()[0]).dtype is BF16
    hmpx.restore()


def test_norms_of_ones_own_are_those_of_fp32_by_hand():
    torch.manual_seed(3)
    model, x = PreNorm(), torch.randn(5, WIDTH).bfloat16()
    hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), "bf16-norms-fp32")
    normed, out = model.norm(x), model(x)
    out.sum().backward()
    hmpx.restore()
    weight = model.norm.weight.detach().requires_grad_()
    wide = x.float()
    by_hand = wide * (wide * wide).mean(-1, keepdim=True).add(1e-3) ** -0.5 * weight.float()
    F.linear(by_hand.bfloat16(), model.layer.weight.detach(), model.layer.bias.detach()).sum().backward()
    assert normed.dtype is FP32 and torch.equal(normed, by_hand) and out.dtype is BF16
    assert weight.grad.dtype is BF16 and torch.equal(model.norm.weight.grad, weight.grad)
    assert not torch.equal(model.norm(x).float(), by_hand)  # what it is without the recipe


def test_norms_of_torch_and_blocks_of_a_convolution_and_a_norm():
    class ConvNorm(nn.Sequential):
        pass

    class NormAct(nn.Sequential):
        pass

    model = nn.Sequential(
        ConvNorm(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)), NormAct(nn.GroupNorm(2, 4), nn.PReLU()), nn.LayerNorm((4, 3))
    )
    hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), "bf16-norms-fp32")
    dtypes = [module(torch.randn(2, 4, 3)).dtype for module in (*model[0], model[1], model[2], model)]
    hmpx.restore()
    assert dtypes == [BF16, FP32, FP32, FP32, FP32]


def test_the_example_shows_log_probs_that_come_closer():
    script = Path(__file__).parents[2] / "examples" / "logprob_mismatch.py"
    done = python.run(script, check=True)
    rows = re.findall(r"^(\S+) +(0\.\d{5}) +(0\.\d{5}) +(0\.\d{5})$", done.stdout, re.MULTILINE)
    figures = {name: tuple(map(float, found)) for name, *found in rows}
    before, wide, products = figures["neuron-bf16-sr"], figures["fp32-head"], figures["bf16-to-fp32"]
    assert all(0 < 1.5 * near < apart for near, apart in zip(wide[:2], before, strict=False))
    assert all(0 < 1.2 * near < apart for near, apart in zip(products[:2], before, strict=False))
    assert 0 < wide[2] < products[2] < before[2]


class Deep(nn.Module):
    """Blocks of two layers each, a larger list beside them that holds no blocks, and a head."""

    def __init__(self, count, kind=nn.ModuleList):
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(count)]
        self.blocks = kind({str(i): each for i, each in enumerate(blocks)} if kind is nn.ModuleDict else blocks)
        self.lm_head = nn.Linear(32, 48)

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return self.lm_head(x)


@pytest.mark.parametrize(
    ("count", "kept", "kind"),
    [
        (2, 1, nn.ModuleList),
        (7, 2, nn.ModuleDict),
        pytest.param(20, 3, lambda blocks: nn.Sequential(*blocks), marks=pytest.mark.slow),
    ],
)
def test_the_last_blocks_and_the_head_stay_in_bf16(count, kept, kind):
    """At least 15 %, as torchtitan has it: of 32 blocks the last 5, of 36 the last 6."""
    model = Deep(count, kind)
    hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), "torchao-nvfp4")
    with hmpx.record() as log:
        model(torch.randn(16, 32))
    hmpx.restore()
    rules = {site.module: site.rule for site in log.sites if site.op == "linear"}
    low = {f"blocks.{i}.{j}" for i in range(count - kept) for j in range(2)} | {"begin.0", "begin.2"}
    assert {name for name, rule in rules.items() if rule == "fp8"} == low
    assert {name for name, rule in rules.items() if rule == "bf16"} == {
        "lm_head", *(f"blocks.{i}.{j}" for i in range(count - kept, count) for j in range(2))
    }  # fmt: skip


class Careful(Router):
    """The model says itself that its router is FP32."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            self.seen = F.linear(x.float(), self.weight).dtype
        return super().forward(x)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mid = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.router, self.head = Careful(), nn.Linear(32, 64)

    def forward(self, x):
        x = self.mid(x)
        return self.head(x), self.router(x)


OF_FP8 = [name for name in recipe_names() if read_recipe(name).fp8]
BASES = {"torchao-float8-tensorwise", "torchao-nvfp4"}  # whose roles the others take over


def test_recipes_of_fp8_have_the_roles_of_one_of_two():
    assert [*dict.fromkeys(str(read_recipe(name).modules) for name in OF_FP8 if name not in BASES)] == [
        str(read_recipe("torchao-float8-tensorwise").modules)
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in BASES)) for n in OF_FP8])
def test_recipes_of_fp8_leave_heads_and_routers_out_of_it(name):
    torch.manual_seed(0)
    headless = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))  # fits nothing, which is no error
    x, models = torch.randn(16, 32), (Routed(), headless)
    recipe = {"extends": name, "parameter_dtype": "float32"}
    optimizers = [optim.SGD(each.parameters()) for each in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        hmpx.prepare(model, optimizer, recipe)
    with hmpx.record() as log:
        models[0](x)
    assert headless(x).dtype is BF16
    hmpx.restore(*optimizers)
    rules = {site.module: site.rule for site in log.sites if site.op == "linear" and site.rule}
    assert (rules["mid.0"], rules["head"], rules["router"], models[0].router.seen) == ("fp8", "bf16", "bf16", FP32)


def test_an_empty_fp8_list_of_a_rule_takes_what_is_around_it_out_of_fp8():
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    with hmpx.convert(fp8=["linear"]):
        rule = hmpx.policy_for(model, fp8=[])
        found = model(x)
        rule.remove()
        assert not torch.equal(found, model(x))
    with hmpx.convert():
        assert torch.equal(found, model(x))
