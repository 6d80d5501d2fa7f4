"""Where casts belong to the model, whatever else a program computes is torch's, to the bit; the oracle is torch."""

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import threading
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.base import process_state
from hmpx.recipes.reading import as_recipe, recipe_names
from tests.support.same import same

BF16, FP32 = torch.bfloat16, torch.float32
LISTS = {"bf16": ["linear", "matmul", "mul", "add", "sub"], "fp32": ["softmax", "div", "cross_entropy"], "promote": []}


class Product(nn.Module):
    """Calls an op itself, beside the modules in it."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.linear(x) @ self.weight


@pytest.fixture
def model():
    with hmpx.convert(where="model", **LISTS):
        yield Product()


def test_what_stands_in_no_model_is_torchs(model):
    """Timesteps, an average of weights kept by hand, data, a metric; each beside the same line without casts."""
    model = model.requires_grad_(True)
    logits, labels = torch.randn(64, 8), torch.randint(8, (64,))

    def averaged():
        average = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for _ in range(20):
                for a, p in zip(average, model.parameters(), strict=True):
                    a.copy_(a * 0.999 + (p + 0.01) * (1 - 0.999))
        return torch.cat([a.flatten() for a in average])

    def timesteps():
        torch.manual_seed(3)
        return (torch.rand(50_000) * 1000).long()

    lines = {
        "timesteps": timesteps,
        "average": averaged,
        "data": lambda: (torch.linspace(0, 1, 64) - 0.4) / 0.3,
        "metric": lambda: (logits * 100).softmax(-1).gather(1, labels[:, None]),
    }
    for name, line in lines.items():
        with hmpx.disable_casts():
            expected = line()
        assert torch.equal(line(), expected), name
    assert timesteps().unique().numel() == 1000


def test_a_forward_casts_with_gradients_and_without(model):
    x = torch.randn(4, 8)
    assert model(x).dtype is BF16
    with torch.no_grad():
        assert model(x).dtype is BF16
        assert model.forward(x).dtype is BF16, "called by hand"
        assert model.eval()(x).dtype is BF16
    with torch.inference_mode():
        assert model(x).dtype is BF16
    assert not process_state.converted or not hmpx.base.region_state.open_regions()


def test_a_forward_that_raises_leaves_no_region_open(model):
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 7))
    assert (torch.rand(3) * 2).dtype is FP32


def test_a_loss_outside_of_the_model_is_as_in_training(model):
    x, labels = torch.randn(4, 8), torch.arange(4)
    training = F.cross_entropy(model(x), labels)
    with torch.no_grad():
        validation = F.cross_entropy(model(x), labels)
    assert training.dtype is validation.dtype is FP32
    assert torch.equal(training, validation)


def test_an_op_that_torch_would_refuse_is_cast_as_its_list_says(model):
    """A projection beside the forwards: its input is BF16 because of casts in them, its weight FP32."""
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert (model(x) @ model.weight).dtype is BF16


@pytest.mark.parametrize("where", ["model", "everywhere"])
def test_hooks_of_gradients_are_torchs(where):
    hooks = {"twice": lambda g: g * 2, "half": lambda g: g / 2, "masked": lambda g: g * torch.ones_like(g)}

    def gradients(hook, of_weight):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        h = model[0](torch.randn(5, 8))
        (model[0].weight if of_weight else h).register_hook(hook)
        model[1](h).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    with hmpx.convert(where=where, **LISTS):
        for of_weight in (True, False):
            plain = gradients(lambda g: g, of_weight)
            for name, hook in hooks.items():
                assert same(gradients(hook, of_weight), plain) is (name == "masked"), (name, of_weight)


@pytest.mark.parametrize("where", ["model", "everywhere"])
def test_backward_hooks_of_modules_are_torchs(where):
    seen = []

    def hook(module, of_inputs, of_outputs):
        gradient = of_outputs[0].float()
        seen.append((gradient @ gradient.t()).dtype)

    layer = nn.Linear(8, 8)
    layer.register_full_backward_hook(hook)
    layer.register_full_backward_pre_hook(lambda module, of_outputs: hook(module, (), of_outputs))
    with hmpx.convert(where=where, **LISTS):
        layer(torch.randn(5, 8, requires_grad=True)).float().square().mean().backward()
    assert seen == [torch.float32] * 2


def test_backward_inside_a_forward_runs_hooks_as_torch():
    class Training(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(8, 8), []
            self.linear.weight.register_hook(lambda g: self.seen.append((g * 2).dtype))

        def forward(self, x):
            self.linear(x).float().sum().backward()
            return self.linear(x)

    with hmpx.convert(where="model", **LISTS):
        training = Training()
        assert training(torch.randn(4, 8)).dtype is BF16 and training.seen == [FP32]


class Scaled(torch.autograd.Function):
    dtypes: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        Scaled.dtypes.append((gradient.float() * 3).dtype)
        return gradient * 3


def test_the_backward_of_a_function_of_ones_own_follows_its_forward(model):
    """Cast if that was called in a model; outside of one, on an island and in `disable_casts` it is torch's."""

    class Inside(nn.Module):
        def __init__(self, region):
            super().__init__()
            self.weight, self.region = nn.Parameter(torch.ones(8)), region

        def forward(self, x):
            with self.region():
                return Scaled.apply(x * self.weight)

    cases = {
        "in a model": (Inside(contextlib.nullcontext), BF16),
        "called by hand": (Inside(contextlib.nullcontext).forward, BF16),
        "on an island": (Inside(lambda: torch.autocast("cpu", enabled=False)), FP32),
        "without casts": (Inside(hmpx.disable_casts), FP32),
        "outside": (lambda x: Scaled.apply(model(x)), FP32),
    }
    for name, (run, dtype) in cases.items():
        Scaled.dtypes.clear()
        run(torch.randn(4, 8, requires_grad=True)).float().sum().backward()
        assert Scaled.dtypes == [dtype], name
    with hmpx.convert(**LISTS):
        Scaled.dtypes.clear()
        Scaled.apply(torch.randn(4, 8, requires_grad=True)).float().sum().backward()
    assert Scaled.dtypes == [BF16], "everywhere"


def raised(function):
    """What a function makes of FP32 copies of its BF16 tensors, without casts."""
    return lambda *values: function(*[each.float() if each.is_floating_point() else each for each in values])


UP = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "distribution": lambda x: torch.distributions.Categorical(logits=x).log_prob(torch.arange(len(x))),
    "logsumexp": lambda x: x[:, 0] - x.logsumexp(-1),
    "ctc_loss": lambda x: F.ctc_loss(
        x.log_softmax(-1)[:, None], torch.ones(1, 2, dtype=torch.long), torch.tensor([len(x)]), torch.tensor([2])
    ),
    "numpy": lambda x: torch.from_numpy(x.detach().softmax(-1).numpy()),
    "quantile": lambda x: x.exp().quantile(0.5),
    "norm": lambda x: torch.linalg.vector_norm(x),
}


@pytest.mark.parametrize("recipe", ["autocast-cuda", "bf16-sr"])
def test_an_op_of_the_fp32_list_computes_in_fp32_wherever_low_precision_comes(recipe):
    """With gradients, without, and of a frozen copy; the oracle is the same line in FP32."""
    x = torch.randn(6, 8)
    model = nn.Linear(8, 8)
    with hmpx.activate(recipe):
        frozen = copy.deepcopy(model).requires_grad_(False)
        for name, line in UP.items():
            with torch.no_grad():
                without = line(model(x))
                logits = model(x)
            found = {"gradients": line(model(x)), "no_grad": without, "frozen": line(frozen(x))}
            with hmpx.disable_casts():
                expected = raised(line)(logits)
            assert logits.dtype is BF16
            for how, result in found.items():
                assert result.dtype is FP32 and torch.equal(result, expected), (name, how)


def test_where_low_precision_is_not_raised():
    """In `disable_casts()`, on an island, in a hook, in a step, and where data is loaded."""
    low, found = torch.randn(4, 4).bfloat16(), {}

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return low.softmax(-1)

    class Softened(torch.optim.SGD):
        def step(self, closure=None):
            found["step"] = low.softmax(-1)

    with hmpx.convert(where="model", **LISTS):
        assert low.softmax(-1).dtype is FP32
        with hmpx.disable_casts():
            found["off"] = low.softmax(-1)
        with torch.autocast("cpu", enabled=False):
            found["island"] = low.softmax(-1)
        x = low.clone().requires_grad_()
        x.register_hook(lambda g: found.setdefault("hook", g / 3))
        x.sum().backward()
        Softened([nn.Parameter(torch.ones(1))], lr=0.1).step()
        found["data"] = next(iter(torch.utils.data.DataLoader(Data())))[0]
    assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(found, BF16) and len(found) == 5


class Similarity(nn.Module):
    """A difference of large numbers, as in SSIM; a metric has no parameters."""

    def forward(self, a, b):
        return self.update(a, b)

    def update(self, a, b):
        return a @ b.t() - a.mean() * b.mean()


class Average(nn.Module):
    """It writes its parameter when it is called; `how` is what people write there."""

    def __init__(self, how, trainable):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.zeros(8), requires_grad=trainable)

    @torch.no_grad()
    def forward(self, model):
        model = model[0] if isinstance(model, list) else model
        weight = model[0] if isinstance(model, torch.Tensor) else model.weight[0]
        if len(weight) > 1:
            self.how(self.weight, weight)


AVERAGES = {
    "copy_": lambda own, weight: own.copy_(own * 0.999 + weight * (1 - 0.999)),
    "data": lambda own, weight: own.data.copy_((own - (own - weight) * 0.001).data),
    "add_": lambda own, weight: own.add_((weight - own) * 0.001),
}
HANDED = {"a module": lambda model: model, "weights": lambda model: model.weight, "a list": lambda model: [model]}


def test_a_module_without_parameters_that_is_outermost_follows_its_tensors():
    """A metric is torch's; a contrastive loss, whose tensors require a gradient, is cast as code in no module is."""
    a = torch.rand(6, 8) * 0.05 + 100
    with hmpx.disable_casts():
        exact = Similarity()(a, a)
    outer = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    metric = Similarity()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.metric = nn.Linear(8, 8), metric

        def forward(self, x):
            return self.metric(x, x)

    with hmpx.convert(where="model", **LISTS):
        for way in (metric, metric.forward, metric.update):
            assert torch.equal(way(a, a), exact), way
            trained = a.clone().requires_grad_()
            assert way(trained, trained).dtype is (trained @ trained.t()).dtype is BF16, way
            with torch.no_grad():
                assert torch.equal(way(trained, trained), exact), way
        assert Model()(a).dtype is BF16, "a part of the model"
        assert outer(a).dtype is BF16 and (nn.Linear(8, 8)(a)).dtype is BF16


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class Handed(nn.Module):
    """Its forward is handed weights; `more` is what else it does, `returned` what it makes of its result."""

    def __init__(self, more=lambda self: None, returned=lambda y: y):
        super().__init__()
        self.weight, self.more, self.returned = nn.Parameter(torch.eye(8)), more, returned

    def forward(self, x, weights=None):
        self.more(self)
        return self.returned(F.linear(x, self.weight))


def writes(module):
    with torch.no_grad():
        module.weight.mul_(1)


def test_each_call_of_a_model_is_cast_whatever_it_is_handed_and_returns():
    """The first as the others: soft prompts, a layer's weight for a loss, a teacher; and after a call that raises."""
    x, made, frozen = torch.randn(4, 8), [], Handed(writes).requires_grad_(False)
    nets = [Handed(), Handed(returned=Output), Handed(returned=lambda y: {"y": y}), Handed(writes), frozen]
    nets.append(Handed(returned=lambda y: made.append(Output(y)) or made[-1]))
    given = [(nn.Parameter(x),), (x, nn.Linear(2, 2)), (x, [nn.Parameter(x)]), (x,)]
    for failing in (None, nn.Parameter(x[:, :3])):
        with hmpx.convert(where="model", **LISTS), torch.no_grad():
            for net, args in itertools.product(nets, (*given, *given)):
                if failing is not None:
                    with pytest.raises(RuntimeError):
                        net(failing)
                y = net(*args)
                y = y["y"] if isinstance(y, dict) else getattr(y, "y", y)
                assert y.dtype is BF16, (nets.index(net), len(args))


@pytest.mark.parametrize("trainable", [False, True])
def test_a_module_that_writes_its_own_parameters_when_it_is_called_is_no_model(trainable):
    for (name, how), (what, handed) in itertools.product(AVERAGES.items(), HANDED.items()):
        found = []
        for around in (contextlib.nullcontext, lambda: hmpx.convert(where="model", **LISTS)):
            torch.manual_seed(0)
            model, average = nn.Linear(8, 8), Average(how, trainable)
            with around():
                for _ in range(20):
                    average(handed(model))
            found.append(average.weight.detach())
        assert torch.equal(*found), (name, what)


def test_a_module_whose_forward_writes_a_part_of_it_is_a_model_where_it_is_trained():
    """A code book that is an average, in a model with weights."""

    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.book = nn.Linear(8, 8), nn.Parameter(torch.zeros(8), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.book.mul_(0.9)
            return self.linear(x)

    model = Coded()
    with hmpx.convert(where="model", **LISTS):
        assert {model(torch.randn(4, 8)).dtype for _ in range(3)} == {BF16}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_backward_has_the_forwards_casts(model, reentrant):
    """Of a module, and of a function in no module; the oracle is the run that keeps everything."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    bodies = {
        "module": model,
        "function": lambda x: (x @ weight) * (x * 2),
        "no gradient": lambda x: x @ x.detach().t() + x.sum(),
    }
    for name, body in bodies.items():
        found = []
        for run in (body, lambda x, body=body: checkpoint(body, x, use_reentrant=reentrant)):
            for each in (x, weight, *model.parameters()):
                each.grad = None
            y = run(x)
            y.float().square().sum().backward()
            found.append(
                (y.detach(), *[each.grad for each in (x, weight, *model.parameters()) if each.grad is not None])
            )
        assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found)), name


def test_functional_calls_and_transforms_are_forwards(model):
    x = torch.randn(4, 8)
    params = {name: p.detach() for name, p in model.named_parameters()}
    expected = model(x)

    def output(params, x):
        return torch.func.functional_call(model, params, (x,))

    assert torch.equal(output(params, x), expected)
    assert torch.func.vmap(output, in_dims=(None, 0))(params, x[:, None]).dtype is BF16
    gradient = torch.func.grad(lambda params: output(params, x).float().square().mean())(params)
    expected.float().square().mean().backward()
    for name, p in model.named_parameters():
        assert torch.equal(gradient[name], p.grad), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_a_forward(model, backend):
    """A model, and a function that calls one, without a gradient too; one graph each."""
    x, graphs = torch.randn(4, 8), []

    def counting(module, inputs):
        graphs.append(module)
        if backend == "eager":
            return module.forward
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    def function(x):
        return model(x).float() * x, x @ x.t()

    compiled = torch.compile(model, backend=counting, fullgraph=True)
    expected = model(x)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert len(graphs) == 1
    with torch.no_grad():
        compiled = torch.compile(function, backend=counting, fullgraph=True)
        assert [each.dtype for each in compiled(x)] == [BF16, BF16]
    assert (x @ x.t()).dtype is FP32


def test_a_scripted_module_is_a_forward(model):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.jit.script(nn.Linear(8, 8))

        def forward(self, x):
            return self.inner(x), x @ x.t()

    inner, product = Outer()(torch.randn(4, 8))
    assert inner.dtype is FP32 and product.dtype is BF16  # the inside of a scripted module is C++'s


def test_a_closure_of_an_optimizer_is_as_outside_of_the_step(model):
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append((model(x).dtype, (x * 2).dtype))
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    x, optimizer = torch.randn(4, 8), torch.optim.LBFGS(model.parameters(), max_iter=2)
    optimizer.step(closure)
    with hmpx.disable_casts():
        optimizer.step(closure)
    assert set(seen) == {(BF16, FP32)}


def test_threads_and_tasks_do_not_see_each_others_forwards(model):
    """While one is inside a forward, another's arithmetic stays torch's."""
    entered, found = threading.Event(), []

    class Waiting(nn.Linear):
        def forward(self, x):
            entered.set()
            done.wait(20)
            return x * 2

    def forward():
        found.append(Waiting(1, 1)(torch.rand(3)).dtype)

    done = threading.Event()
    thread = threading.Thread(target=forward)
    thread.start()
    assert entered.wait(20)
    found.append((torch.rand(3) * 2).dtype)
    done.set()
    thread.join()
    assert found == [FP32, BF16]

    async def tasks():
        async def one():
            await asyncio.sleep(0)
            return model(torch.randn(4, 8)).dtype, (torch.rand(3) * 2).dtype

        return await asyncio.gather(one(), one())

    assert asyncio.run(tasks()) == [(BF16, FP32)] * 2

    async def outliving():
        async def look():
            return (torch.rand(3) * 2).dtype

        with hmpx.enable_casts():
            task, inside = asyncio.create_task(look()), (torch.rand(3) * 2).dtype
        return inside, await task  # which has begun in the region, and runs after it

    assert asyncio.run(outliving()) == (BF16, FP32)


def test_everywhere_is_the_rule_of_convert_and_the_recipes_say_which_they_have():
    with hmpx.convert(**LISTS) as handle:
        assert (torch.rand(3) * 2).dtype is BF16 and "where: everywhere" in repr(handle)
    everywhere = {name for name in recipe_names() if as_recipe(name).where == "everywhere"}
    assert everywhere == {"hmp-o1", "hmp-o2", "xla-use-bf16", "xla-downcast-bf16"}


def test_record_and_the_verbose_log_name_casts_outside_of_any_model(caplog):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    caplog.set_level("INFO", "hmpx")
    with hmpx.convert(isVerbose=True, **LISTS), hmpx.record() as log:
        model(x).sum().backward()
        for _ in range(3):
            (torch.rand(5) * 1000).long()
        with hmpx.enable_casts():
            torch.rand(5) * 1000
    outside = [(site.op, site.outside) for site in log.sites if site.outside]
    assert outside == [("mul", 3)] and "Cast outside of any model" in str(log)
    said = [r.getMessage() for r in caplog.records if "outside of any model" in r.getMessage()]
    assert len(said) == 2 and "1 times" not in said[0], "once when it is made, once in the counts at the end"
