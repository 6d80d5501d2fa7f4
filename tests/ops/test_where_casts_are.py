"""In which dtype an op runs: a table of situations and settings, for eager and for compiled code.

A situation is a function that calls `probe` somewhere: in a model's forward, in a hook, in a region. Its row says
what is found there under ``where="model"``, under ``where="everywhere"`` and with casts off, each in a word of `state`.
"""

import asyncio
import contextlib
import copy
import threading

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import hmpx
from hmpx import hmp
from hmpx.base import region_state
from tests.support.compiling import nothing_compiled, recent  # noqa: F401

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(4, 4)

pytestmark = pytest.mark.filterwarnings("ignore")
PRODUCTS = ["matmul", "mm"]
BY_HAND = {
    made: {dtype: X.to(made).to(dtype) @ X.to(made).to(dtype) for dtype in (BF16, FP16, FP32)} for made in (FP32, BF16)
}


def probe(x):
    """Four ops: two products of the low list, a product of BF16, and an op of the FP32 list on BF16."""
    low = x.to(torch.bfloat16)
    return x @ x, torch.mm(x, x), low @ low, low.prod(-1)


def state(found, low):
    """Name what happened to the four ops of `probe`."""
    dtypes = tuple(each.dtype for each in found)
    names = {
        (low, low, low, FP32): "low",  # as the lists say
        (FP32, FP32, FP32, FP32): "fp32",  # the products are in the FP32 list here
        (BF16, BF16, BF16, BF16): "bf16",  # everything is
        (FP32, FP32, BF16, FP32): "up",  # left as it is, but for low precision that comes to the FP32 list
        (FP32, FP32, BF16, BF16): "off",  # left as it is
    }
    return names.get(dtypes, str(dtypes))


class Model(nn.Module):
    """A forward is what `body` makes of the input."""

    def __init__(self, body=probe):
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(4)), body

    def forward(self, x):
        return self.body(x)


class Metric(nn.Module):
    """It has no parameters."""

    def forward(self, x):
        return self.update(x)

    def update(self, x):
        return probe(x)


def within(region, function):
    def run(x):
        with region():
            return function(x)

    return run


def both(*functions):
    return lambda x: [function(x) for function in functions]


def trained(function):
    return lambda x: function(x * MODEL.weight)


def island():
    return torch.autocast("cpu", enabled=False)


def on_island(body):
    return Model(within(island, body))


def uncast(body):
    return Model(within(hmpx.disable_casts, body))


def opened():
    return torch.autocast("cpu", dtype=BF16)


def noted(run):
    """All that is found where a situation calls `note`."""

    def situation(x):
        found = []
        run(x, lambda *_: found.append(probe(X)))
        return found

    return situation


# What stands around autograd


def hook_of_a_tensor(x, note):
    y = x.clone().requires_grad_()
    y.register_hook(note)
    y.sum().backward()


def hook_of_a_weight(x, note):
    model = Model(lambda x: x * model.weight)
    model.weight.register_hook(note)
    model(x).sum().backward()


def future_of_a_hook(x, note):
    """As a communication hook of DDP does: another thread calls what it leaves, and what that leaves."""
    future, y = torch.futures.Future(), x.clone().requires_grad_()
    y.register_hook(lambda _: [torch._C.Future.then(future, lambda done: done.then(note)), None][1])
    y.register_hook(lambda _: future.add_done_callback(note))
    y.sum().backward()
    done = threading.Thread(target=future.set_result, args=(x,))
    done.start()
    done.join()


def hooks_of_a_module(x, note):
    model = Model(lambda x: x * 1)
    model.register_full_backward_hook(note)
    model.register_full_backward_pre_hook(note)
    model(x.clone().requires_grad_()).sum().backward()


def backward_in_a_forward(x, note):
    Model(lambda x: hook_of_a_weight(x, note))(x)


def future_of_a_backward(x, note):
    future = torch.futures.Future()
    backward_of(Model)(x, lambda: future.then(note))
    future.set_result(x)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


class InFp32(Own):
    forward = staticmethod(torch.amp.custom_fwd(Own.forward, device_type="cpu", cast_inputs=FP32))
    backward = staticmethod(torch.amp.custom_bwd(Own.backward, device_type="cpu"))


class WithoutBwd(InFp32):
    backward = staticmethod(Own.backward)


class Nested(Own):
    """Its backward calls another function."""

    @staticmethod
    def backward(ctx, gradient):
        return Own.apply(gradient, ctx.note), None


def backward_of(around, function=Own):
    """A custom function's, whose forward `around` has called."""

    def run(x, note):
        around(lambda x: function.apply(x, note))(x.clone().requires_grad_()).sum().backward()

    return run


def backward_of_a_backward(x, note):
    x = x.clone().requires_grad_()
    gradient = torch.autograd.grad(Model(lambda x: Nested.apply(x, note))(x).square().sum(), x, create_graph=True)[0]
    gradient.sum().backward()


def in_a_forward(run):
    return lambda x, note: Model(lambda x: run(x, note))(x)


def computed_again(around, reentrant, region=contextlib.nullcontext):
    """What runs in the forward, and again in the backward pass."""

    def run(x, note):
        def body(x):
            with region():
                note()
            return x * x

        around(lambda x: checkpoint(body, x, use_reentrant=reentrant))(x.clone().requires_grad_()).sum().backward()

    return run


# What else a program computes


def step_of_an_optimizer(x, note):
    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            note()

    Noting([nn.Parameter(torch.ones(1))], lr=0.1).step()


def closure_of_an_optimizer(x):
    found = []

    def closure():
        found[:] = probe(x), MODEL(x)
        return torch.zeros((), requires_grad=True)

    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step(closure)
    return found


def scheduler(x, note):
    lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), lambda epoch: note() or 1.0)


class Data(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return probe(X)


class Average(nn.Module):
    """Its forward, which is handed a model or weights, writes its own weights and returns nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    @torch.no_grad()
    def forward(self, handed, note):
        weight = getattr(handed[0] if isinstance(handed, list) else handed, "weight", handed)
        self.weight.copy_(self.weight * 0.9 + weight * 0.1)
        note()


class Holding(Average):
    """It is handed no weights, so that its first call may be a model's."""

    def forward(self, note):
        super().forward(MODEL, note)


class InGradMode(Average):
    def forward(self, model, found):
        found.append(trained(probe)(X))
        self.weight.data.copy_(model.weight)


def average_of(handed):
    module = Average()
    return noted(lambda x, note: [module(handed, note) for _ in range(2)])


def average_that_holds_its_model(x, note):
    for module in (HOLDING, HOLDING):
        module(note)


def average_in_grad_mode(x):
    found = []
    for module in (IN_GRAD_MODE, IN_GRAD_MODE):
        module(MODEL, found)
    return found


class CodeBook(Model):
    """A model that writes a part of itself."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(1)
        return probe(x)


def after_an_error(x):
    for module in (Model(fail), FAILING):
        with contextlib.suppress(KeyboardInterrupt):
            module(x)
    return probe(x)


def fail(x):
    raise KeyboardInterrupt


def leaving(x):
    """A module leaves the region around it."""
    region = hmpx.enable_casts()
    region.__enter__()
    inside = LEAVING((region, x))
    return inside, probe(x)


def left(given):
    region, x = given
    region.__exit__(None, None, None)
    return probe(x)


def beside_a_forward(x):
    """In this thread, while another one runs a forward, and in that."""
    entered, done, found = threading.Event(), threading.Event(), []

    def waiting(x):
        entered.set()
        done.wait(20)
        return probe(x)

    thread = threading.Thread(target=lambda: found.append(Model(waiting)(x)))
    thread.start()
    entered.wait(20)
    here = probe(x)
    done.set()
    thread.join()
    return here, *found


def tasks(*regions):
    """Tasks of one loop, each in a region of its own, while the others are in theirs."""

    def run(x):
        async def one(region):
            with region():
                await asyncio.sleep(0)
                return probe(x)

        async def all_of_them():
            return await asyncio.gather(*map(one, regions))

        return asyncio.run(all_of_them())

    return run


def outliving_task(x):
    async def look():
        return probe(x)

    async def begin():
        with hmpx.enable_casts():
            task = asyncio.create_task(look())
        return await task

    return asyncio.run(begin())


# What a region is made of


def generated(x):
    with island():
        yield probe(x)
        yield probe(x)


def generator(x):
    return *generated(x), probe(x)


def closed_generator(x):
    inside = generated(x)
    first = next(inside)
    inside.close()
    return first, probe(x)


def raising(x):
    with contextlib.suppress(ValueError), island():
        raise ValueError
    return probe(x)


def asking(x):
    """As in transformers 5.0 to 5.17."""
    with island() if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
        inside = probe(x)
    return inside, probe(x)


@torch.autocast("cpu", enabled=False)
def decorated(x):
    return probe(x)


@torch.autocast("cpu", enabled=False)
def recursive(x, depth=2):
    return recursive(x, depth - 1) if depth else probe(x)


def listed():
    return hmpx.casts(fp32=PRODUCTS)


def low():
    return hmpx.casts(bf16=PRODUCTS)


def other():
    return hmpx.casts(fp32=["exp"])


SPELLED = {
    "torch.amp": lambda: torch.amp.autocast("cuda", enabled=False),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast(False),
    "torch.cpu.amp": lambda: torch.cpu.amp.autocast(enabled=False),
    "by position": lambda: torch.autocast("cpu", BF16, False),
    "torch.amp, by position": lambda: torch.amp.autocast("cuda", FP16, False, True),
    "float32": lambda: torch.autocast("cpu", dtype=FP32),
    "float32 of a device that is not here": lambda: torch.autocast("cuda", dtype=FP32),
}

KEPT = hmp.disable_casts
MODEL, METRIC, BOOK, SCRIPTED = Model(), Metric(), CodeBook(), torch.jit.script(probe)
HOLDING, IN_GRAD_MODE = Holding(), InGradMode()
FROZEN = copy.deepcopy(MODEL).requires_grad_(False).eval()
HELD = nn.ModuleList([Model(), nn.ModuleDict({"a": Model()})])
OF_ONE = {
    "fp32": "fp32",
    "bf16": "bf16",
    "listed": {"fp32": PRODUCTS},
    "low": {"bf16": PRODUCTS},
    "other": {"fp32": ["exp"]},
}
RULED = {name: Model() for name in OF_ONE}
OPENS, OUTER = on_island(probe), Model(both(probe, RULED["other"]))
AROUND = Model(both(MODEL, RULED["other"], RULED["bf16"], RULED["low"]))
IN_THE_SAME = Model(on_island(RULED["low"]))
FAILING, LEAVING = Model(fail), Model(left)
GIVEN = [(module, OF_ONE[name]) for name, module in RULED.items()]
GIVEN += [(OPENS, OF_ONE["low"]), (IN_THE_SAME, OF_ONE["low"]), (OUTER, OF_ONE["listed"]), (AROUND, OF_ONE["listed"])]
GIVEN += [(FAILING, OF_ONE["listed"]), (LEAVING, "fp32")]
GIVEN += [(HELD[1], OF_ONE["other"]), (HELD, OF_ONE["listed"]), (HELD[0], OF_ONE["low"])]


def functional(x):
    return functional_call(MODEL, {"weight": x[0]}, (x,))


def mapped(x):
    return [each[0] for each in torch.func.vmap(lambda weight: functional_call(MODEL, {"weight": weight}, (x,)))(x[:1])]


def derived(x):
    def loss(weight):
        found = functional_call(MODEL, {"weight": weight}, (x,))
        return found[0].float().sum(), found

    return torch.func.grad(loss, has_aux=True)(x[0])[1]


def again(x):
    return checkpoint(MODEL, x, use_reentrant=False)


# The table. The fourth word says where compiled code is asked, too: `traced`, or in the slow tests alone (`slow`). It
# cannot do the others (`eager`). What is traced counts as a model's, whatever `where` is.

FORWARDS = {
    "no module": (probe, "up low off slow"),
    "no module, and a tensor requires a gradient": (trained(probe), "low low off slow"),
    "that under no_grad": (within(torch.no_grad, trained(probe)), "up low off traced"),
    "a leaf that requires one, under no_grad": (
        within(torch.no_grad, lambda x: probe(x.clone().requires_grad_())),
        "up low off eager",
    ),
    "a model": (MODEL, "low low off traced"),
    "a model under no_grad": (within(torch.no_grad, MODEL), "low low off slow"),
    "a model under inference_mode": (within(torch.inference_mode, MODEL), "low low off slow"),
    "a frozen copy of a model": (FROZEN, "low low off slow"),
    "a forward that is called by hand": (lambda x: MODEL.forward(x), "low low off slow"),
    "a model, then no module": (both(MODEL, probe), "low/up low/low off/off slow"),
    "a model with other weights": (functional, "low low off slow"),
    "a model under vmap": (mapped, "low low off slow"),
    "a model under torch.func.grad": (derived, "low low off slow"),
    "a checkpointed model": (again, "low low off traced"),
    "a module without parameters": (METRIC, "up low off slow"),
    "a method of it": (METRIC.update, "up low off slow"),
    "it, and a tensor requires a gradient": (trained(METRIC), "low low off slow"),
    "it in a model": (Model(METRIC), "low low off slow"),
    "a model that writes a part of itself": (both(BOOK, BOOK), "low/low low/low off/off eager"),
    "an average of weights": (average_of(MODEL.weight), "up/up low/low off/off eager"),
    "an average of a model": (average_of(MODEL), "up/up low/low off/off eager"),
    "an average of models in a list": (average_of([MODEL]), "up/up low/low off/off eager"),
    "one that holds its model": (noted(average_that_holds_its_model), "low/up low/low off/off eager"),
    "one in grad mode": (average_in_grad_mode, "up/up low/low off/off eager"),
    "after models that have raised": (after_an_error, "up low off eager"),
    "scripted code in a model": (Model(both(SCRIPTED, probe)), "off/low off/low off/off eager"),
    "no module, beside a model in another thread": (beside_a_forward, "up/low low/low off/off eager"),
    "a task that outlives enable_casts, where it began": (outliving_task, "up low off eager"),
}
BACKWARD = {
    "the hook of a tensor": (noted(hook_of_a_tensor), "off off off eager"),
    "the hook of a weight": (noted(hook_of_a_weight), "off off off eager"),
    "what a hook leaves to a future": (noted(future_of_a_hook), "off/off off/off off/off eager"),
    "what a custom backward leaves to one": (noted(future_of_a_backward), "low low off eager"),
    "the backward hooks of a module": (noted(hooks_of_a_module), "off/off off/off off/off eager"),
    "a hook, where a forward calls backward": (noted(backward_in_a_forward), "off off off eager"),
    "a custom backward": (noted(backward_of(Model)), "low low off eager"),
    "a custom backward, the forward by hand": (
        noted(backward_of(lambda call: Model(call).forward)),
        "low low off eager",
    ),
    "a custom backward, of no module": (noted(backward_of(lambda call: call)), "up low off eager"),
    "a custom backward, of an island": (noted(backward_of(on_island)), "off off off eager"),
    "a custom backward, of disable_casts": (noted(backward_of(uncast)), "off off off eager"),
    "a custom backward in FP32": (noted(backward_of(Model, InFp32)), "off off off eager"),
    "that, and custom_bwd is left out": (noted(backward_of(Model, WithoutBwd)), "off off off eager"),
    "that, where a forward calls it": (noted(in_a_forward(backward_of(Model, InFp32))), "off off off eager"),
    "a custom backward of a custom backward": (noted(backward_of_a_backward), "low low off eager"),
}
for how in (False, True):
    name = f"computed again, reentrant={how}: "
    BACKWARD[name + "a model"] = noted(computed_again(Model, how)), "low/low low/low off/off eager"
    BACKWARD[name + "no module"] = noted(computed_again(lambda call: call, how)), "low/low low/low off/off eager"
    BACKWARD[name + "an island"] = noted(computed_again(on_island, how)), "off/off off/off off/off eager"
BESIDE = {
    "the step of an optimizer": (noted(step_of_an_optimizer), "off off off eager"),
    "its closure, and a model there": (closure_of_an_optimizer, "up/low low/low off/off eager"),
    "that in disable_casts": (within(hmpx.disable_casts, closure_of_an_optimizer), "up/low low/low off/off eager"),
    "a scheduler": (noted(scheduler), "off off off eager"),
    "a data set": (lambda x: next(iter(DataLoader(Data(), batch_size=None))), "off off off eager"),
}
ISLANDS = {  # `torch.autocast` in a model
    "an island": (Model(both(within(island, probe), probe)), "off/low off/low off/off traced"),
    "by a decorator": (Model(both(decorated, probe)), "off/low off/low off/off traced"),
    "around a generator": (Model(generator), "off/off/low off/off/low off/off/off slow"),
    "around a generator that is closed": (Model(closed_generator), "off/low off/low off/off slow"),
    "after an error on an island": (Model(raising), "low low off slow"),
    "for code that asks first": (Model(asking), "off/low off/low off/off traced"),
    "enabled, and around it": (
        Model(both(within(island, both(probe, within(opened, probe), probe)), probe)),
        "off/low/off/low off/low/off/low off/low/off/off traced",
    ),
    "an island in the enabled one": (Model(within(island, within(opened, on_island(probe)))), "off off off slow"),
}
# torch's own autocast asks for the device, and an object that is entered in itself leaves it off.
SPELLINGS = {
    name: (Model(both(within(region, probe), probe)), "off/low off/low off/off eager")
    for name, region in SPELLED.items()
} | {"a decorator in itself": (Model(both(recursive, probe)), "off/low off/low off/off eager")}
SCRIPT = {  # `torch.autocast` around models
    "a model in the island of a script": (within(island, MODEL), "low low off traced"),
    "a model in a model there": (within(island, Model(MODEL)), "low low off slow"),
    "no module, a model, no module there": (
        within(island, both(probe, MODEL, probe)),
        "off/low/off off/low/off off/off/off traced",
    ),
    "no module there, with a gradient": (within(island, trained(probe)), "off off off slow"),
    "a model with other weights there": (within(island, functional), "low low off traced"),
    "a checkpointed model there": (within(island, again), "low low off traced"),
    "no module and a model in an enabled region": (within(opened, both(probe, MODEL)), "up/low low/low low/low traced"),
    "an island in an enabled region": (
        within(opened, within(island, both(probe, MODEL))),
        "off/off off/off off/off slow",
    ),
    "disable_casts in an enabled region": (within(opened, within(hmpx.disable_casts, MODEL)), "off off low slow"),
    "an enabled region in disable_casts": (within(hmpx.disable_casts, within(opened, MODEL)), "low low low slow"),
    "an island in disable_casts": (within(hmpx.disable_casts, within(island, MODEL)), "off off off traced"),
    **{
        f"computed again, reentrant={how}: enabled on an island in lists": (
            noted(computed_again(lambda call: within(listed, on_island(call)), how, opened)),
            "fp32/fp32 fp32/fp32 fp32/fp32 eager",
        )
        for how in (False, True)
    },
}
REGIONS = {  # of hmpx
    "disable_casts": (within(hmpx.disable_casts, MODEL), "off off off slow"),
    "disable_casts in a model": (
        Model(both(within(hmpx.disable_casts, probe), probe)),
        "off/low off/low off/off traced",
    ),
    "HMP's disable_casts, kept as a callable": (
        Model(both(within(KEPT, probe), probe)),
        "off/low off/low off/off slow",
    ),
    "its decorator": (hmpx.disable_casts()(MODEL.forward), "off off off slow"),
    "its decorator without parentheses": (hmpx.disable_casts(probe), "off off off traced"),
    "enable_casts": (within(hmpx.enable_casts, probe), "low low low slow"),
    "enable_casts in disable_casts": (
        within(hmpx.disable_casts, both(probe, within(hmpx.enable_casts, probe), probe)),
        "off/low/off off/low/off off/low/off traced",
    ),
    "disable_casts in enable_casts": (within(hmpx.enable_casts, within(hmpx.disable_casts, probe)), "off off off slow"),
    "enable_casts on an island": (on_island(within(hmpx.enable_casts, probe)), "low low low slow"),
    "tasks in regions and in none": (
        tasks(island, hmpx.disable_casts, hmpx.enable_casts, contextlib.nullcontext),
        "off/off/low/up off/off/low/low off/off/low/off eager",
    ),
    "products in the FP32 list": (within(listed, MODEL), "fp32 fp32 fp32 slow"),
    "products in the low list": (within(low, probe), "low low low slow"),
    "in the low list in disable_casts": (within(hmpx.disable_casts, within(low, probe)), "low low low traced"),
    "in the low list on an island": (on_island(within(low, probe)), "low low low slow"),
    "in two lists": (within(low, both(within(listed, probe), probe)), "fp32/low fp32/low fp32/low traced"),
    "lists of other ops": (within(other, MODEL), "low low low slow"),
    "lists of other ops, in a list of products": (within(listed, within(other, MODEL)), "fp32 fp32 fp32 slow"),
    "casts of all to FP32": (within(lambda: hmpx.casts("fp32"), MODEL), "fp32 fp32 fp32 slow"),
    "casts of all to BF16": (within(lambda: hmpx.casts("bf16"), MODEL), "bf16 bf16 bf16 slow"),
    "a cache of weights": (within(hmpx.cached_weights, MODEL), "low low off traced"),
    "a function of BF16": (hmpx.bf16(probe), "bf16 bf16 off slow"),
    "a function of BF16 on an island": (on_island(hmpx.bf16(probe)), "bf16 bf16 off slow"),
    "what follows it in enable_casts": (
        within(hmpx.enable_casts, both(hmpx.bf16(probe), probe)),
        "bf16/low bf16/low bf16/low slow",
    ),
    "a function of BF16 in which casts are off": (hmpx.bf16(hmpx.disable_casts()(probe)), "bf16 bf16 off traced"),
}
RULES = {  # of modules
    "a rule, fp32": (RULED["fp32"], "fp32 fp32 off traced"),
    "a rule, bf16": (RULED["bf16"], "bf16 bf16 off slow"),
    "a rule, products in the FP32 list": (RULED["listed"], "fp32 fp32 off slow"),
    "a rule, products in the low list": (RULED["low"], "low low off slow"),
    "a rule, other ops": (RULED["other"], "low low off slow"),
    "a rule, fp32, on an island": (on_island(RULED["fp32"]), "off off off slow"),
    "a rule, bf16, on an island": (on_island(RULED["bf16"]), "bf16 bf16 off slow"),
    "a rule, the low list, on an island": (on_island(RULED["low"]), "low low off slow"),
    "a rule, other ops, on an island": (on_island(RULED["other"]), "off off off slow"),
    "a rule, the low list, on an island in a module with the same": (IN_THE_SAME, "low low off slow"),
    "a rule, the low list, of who opens an island": (OPENS, "low low off traced"),
    "a rule, bf16, in disable_casts": (within(hmpx.disable_casts, RULED["bf16"]), "off off off slow"),
    "a rule, the FP32 list, around others": (
        AROUND,
        "fp32/fp32/bf16/low fp32/fp32/bf16/low off/off/off/off slow",
    ),
    "a rule, the FP32 list, around a module": (OUTER, "fp32/fp32 fp32/fp32 off/off traced"),
    "a rule, fp32, of who leaves the region around": (leaving, "fp32/up fp32/low fp32/off eager"),
    "a rule of a container, and one in it": (both(HELD[0], HELD[1]["a"]), "low/fp32 low/fp32 off/off slow"),
}
GROUPS = (FORWARDS, BACKWARD, BESIDE, ISLANDS, SPELLINGS, SCRIPT, REGIONS, RULES)
TABLE = {name: (run, words.split()) for group in GROUPS for name, (run, words) in group.items()}
SETTINGS = {
    "model": {"where": "model"},
    "everywhere": {"where": "everywhere"},
    "off": {"where": "model", "enabled": False},
    "off everywhere": {"where": "everywhere", "enabled": False},
}


def column(names, setting):
    return {name: TABLE[name][1][[*SETTINGS].index(setting.removesuffix(" everywhere"))] for name in names}


@contextlib.contextmanager
def converted(setting, low="bfloat16"):
    """In a conversion, with the rules of the modules."""
    lists = {"bf16": PRODUCTS, "fp32": ["prod"], "promote": [], "kernels": "native", "low_precision": low}
    with contextlib.ExitStack() as given:
        for module, rule in GIVEN:
            given.callback(hmpx.policy_for(module, rule).remove)
        with hmpx.convert(**lists, **SETTINGS[setting]):
            yield


def words_for(run, low=BF16, bits=True):
    """What a situation finds. Its products have the bits of those by hand."""

    def words(found):
        if not isinstance(found[0], torch.Tensor):
            return "/".join(map(words, found))
        by_hand = [*(BY_HAND[FP32][each.dtype] for each in found[:2]), BY_HAND[BF16][found[2].dtype]]
        assert not bits or all(map(torch.equal, found[:3], by_hand))
        return state(found, low)

    found = words(run(X))
    assert not region_state.open_regions()
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_eager_code(setting):
    """And after the conversion all is torch's again."""
    with converted(setting):
        assert {name: words_for(run) for name, (run, _) in TABLE.items()} == column(TABLE, setting)
    for group in (FORWARDS, BACKWARD, BESIDE, REGIONS, RULES):
        assert {*"/".join(words_for(run) for run, _ in group.values()).split("/")} == {"off"}


def test_eager_code_in_fp16():
    with converted("model", "float16"):
        for group in (FORWARDS, BACKWARD, REGIONS, RULES):
            assert {name: words_for(run, FP16) for name, (run, _) in group.items()} == column(group, "model")


def test_islands_under_torchs_own_autocast():
    with torch.autocast("cpu", BF16, cache_enabled=False):
        assert {name: words_for(run) for name, (run, _) in ISLANDS.items()} == column(ISLANDS, "everywhere")


def by_an_interpreter(graph, inputs):
    return torch.fx.Interpreter(graph).run


def traced_again(graph, inputs):
    return make_fx(graph)(*inputs)


COMPILED = [("eager", "model"), ("aot_eager", "everywhere"), (by_an_interpreter, "model"), (traced_again, "everywhere")]
TRACED = [name for name, (_, words) in TABLE.items() if words[3] == "traced"]
ALL = [name for name, (_, words) in TABLE.items() if words[3] != "eager"]
MORE = [("aot_eager", "model", ALL), ("eager", "off", TRACED), ("inductor", "model", TRACED)]


@recent
@pytest.mark.parametrize(
    ("backend", "setting", "names"),
    [
        *((*each, TRACED[i :: len(COMPILED)]) for i, each in enumerate(COMPILED)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE),
    ],
)
def test_one_graph(backend, setting, names):
    """A backend that runs the ops of a graph one by one finds the wrappers in torch."""
    with converted(setting):
        for name, expected in column(names, "off" if setting == "off" else "everywhere").items():
            torch._dynamo.reset()
            compiled = torch.compile(TABLE[name][0], backend=backend, fullgraph=True)
            for _ in range(2):
                assert words_for(compiled, bits=backend != "inductor") == expected, name
            assert words_for(probe) == column(["no module"], setting)["no module"], name
