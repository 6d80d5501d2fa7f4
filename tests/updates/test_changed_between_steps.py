"""A step goes on in the batches of the one before until something changes, and then it is as good as a first one.

Each change is made between two steps, beside a twin that looks at everything in each step: the bits are the same.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hmpx.rounding import native
from hmpx.updates.stepping import batching
from tests.support.kept_steps import BF16, everything, give_gradients, made, same
from tests.support.numbers import nearly_equal

SQUARE = 3  # of the sizes: transposed, it has the same shape
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so no step is remembered")


def beside():
    """One that no kernel takes, and one in FP32."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator).bfloat16().t(), torch.randn(30, generator=generator)


def one_in_another_group(params, optimizer, handle):
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def written_by_hand(params, optimizer, handle):
    params[0].data[3].fill_(0.125)
    params[4].data[2, 100:103] = -0.5


def one_more(params, optimizer, handle):
    new = nn.Parameter(params[0].detach().clone())
    new.grad = torch.ones_like(new)
    optimizer.add_param_group({"params": [("new", new)]})


def moments_exchanged(params, optimizer, handle):
    state = optimizer.state[params[0]]
    for key in [key for key in state if "exp_avg" in key]:
        name = key.replace("exp_avg_sq", "?").replace("exp_avg", "exp_avg_sq").replace("?", "exp_avg")
        state["new " + name] = state.pop(key).abs_() if state[key].dtype is not torch.uint8 else state.pop(key)
    for key in [key for key in state if key.startswith("new ")]:
        state[key.removeprefix("new ")] = state.pop(key)


def masters_given(params, optimizer, handle):
    if handle.settings.weights in ("master", "split", "split8"):
        handle.set_masters({p: p.detach().float() + 2**-12 for p in params if p.dtype is BF16})


def a_master_given(params, optimizer, handle):
    if handle.settings.weights in ("master", "split", "split8"):
        handle.set_masters({params[0]: params[0].detach().float() + 2**-12})


def state_of(p, optimizer, way):
    """Another tensor for each of a parameter's moments that is no code of 8 bits."""
    for key, value in optimizer.state[p].items():
        if value.dim() and value.dtype in (BF16, torch.float32) and not key.startswith("hmpx"):
            optimizer.state[p][key] = way(value)


def unscaled_by_a_scaler(params, optimizer, handle):
    """As GradScaler tells a fused optimizer; for one step."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    optimizer.register_step_post_hook(lambda *_: [vars(optimizer).pop(k, 0) for k in ("grad_scale", "found_inf")])


CHANGES = {
    "nothing": lambda ps, o, h: None,
    "lr": lambda ps, o, h: o.param_groups[0].update(lr=0.5),
    "maximize": lambda ps, o, h: o.param_groups[0].update(maximize=True),
    "another seed": lambda ps, o, h: [group.update(hmpx_seed=5) for group in o.param_groups],
    "other dicts of options": lambda ps, o, h: o.param_groups.__setitem__(
        slice(None), [{**group, "lr": 0.5} for group in o.param_groups]
    ),
    "a group without parameters": lambda ps, o, h: o.param_groups.append(
        {**o.param_groups[0], "params": [], "param_names": []}
    ),
    "a parameter in another group": one_in_another_group,
    "a parameter less": lambda ps, o, h: o.param_groups[0]["params"].pop(),
    "a parameter more": one_more,
    "a load": lambda ps, o, h: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "weights elsewhere": lambda ps, o, h: setattr(ps[0], "data", ps[0].data.clone()),
    "weights written by hand": written_by_hand,
    "a strided weight made contiguous": lambda ps, o, h: (
        setattr(ps[5], "data", ps[5].data.contiguous()),
        o.state.pop(ps[5], None),
    ),
    "masters given": masters_given,
    "a master given": a_master_given,
    "other state": lambda ps, o, h: state_of(ps[0], o, torch.ones_like),
    "state in BF16": lambda ps, o, h: state_of(ps[0], o, torch.Tensor.bfloat16),
    "state in BF16 in place": lambda ps, o, h: [
        setattr(value, "data", value.data.bfloat16())
        for value in o.state[ps[0]].values()
        if value.dim() and value.dtype is torch.float32
    ],
    "strided state": lambda ps, o, h: state_of(ps[0], o, lambda value: value.t().contiguous().t()),
    "moments exchanged": moments_exchanged,
    "one more tensor of state": lambda ps, o, h: o.state[ps[5]].update(extra=torch.ones(4, 6)),
    "no state": lambda ps, o, h: o.state.pop(ps[0]),
}
AFTER_GRADIENTS = {
    "a gradient less": lambda ps, o, h: setattr(ps[1], "grad", None),
    "a gradient less of what no kernel takes": lambda ps, o, h: setattr(ps[5], "grad", None),
    "strided gradients": lambda ps, o, h: setattr(ps[0], "grad", ps[0].grad.t().contiguous().t()),
    "gradients still scaled": unscaled_by_a_scaler,
}
WAYS = {
    "stochastic, in slices": {"floor": 1024},
    "split8, 8-bit state, in slices": {"weights": "split8", "state_dtype": "8bit", "floor": 1024},
    "BF16 state, fused": {"state_dtype": BF16, "fused": True},
    "master, 8-bit state, fused": {"weights": "master", "state_dtype": "8bit", "fused": True},
}
OTHER_WAYS = {  # of which no other fact is looked at
    "stochastic": {},
    "stochastic, fused": {"fused": True},
    "BF16 state": {"state_dtype": BF16, "floor": 1024},
    "8-bit state, fused": {"state_dtype": "8bit", "fused": True},
    "split": {"weights": "split"},
    "split, fused": {"weights": "split", "fused": True},
    "master": {"weights": "master", "floor": 1024},
}


@pytest.mark.parametrize(
    "change, way",
    [
        *((change, way) for way in WAYS for change in (*CHANGES, *AFTER_GRADIENTS)),
        *((change, way) for way in OTHER_WAYS for change in ("nothing", "masters given")),
    ],
)
def test_a_change_between_two_steps_is_seen(change, way, monkeypatch):
    settings = {**WAYS, **OTHER_WAYS}[way].copy()
    monkeypatch.setattr(batching, "_FLOOR", settings.pop("floor", 1 << 17))
    results, kept = [], []
    for forget in (False, True):
        options = {"fused": True} if "scaled" in change else {}
        params, optimizer, handle = made(options=options, more=beside(), **settings)
        for turn in range(6):
            if turn == 3 and change in CHANGES:
                CHANGES[change](params, optimizer, handle)
            give_gradients(optimizer, turn)
            if turn == 3 and change in AFTER_GRADIENTS:
                AFTER_GRADIENTS[change](params, optimizer, handle)
            if forget:
                handle.look_again()
            optimizer.step()
            kept.append(handle.kept_steps)
        results.append(everything(params, optimizer, handle))
    assert same(*results) and not any(x.isnan().any() for x in results[0])
    assert kept[2] >= 1 and kept[6:] == [0] * 6
    if change == "nothing":
        assert kept[5] >= 2


def transposed(tensor):
    tensor.data = tensor.data.t()


def transposed_in_place(tensor):
    with torch.no_grad():
        tensor.t_()


LAID = {
    "a parameter": lambda o, p: p,
    "its gradient": lambda o, p: p.grad,
    "exp_avg": lambda o, p: o.state[p]["exp_avg"],
}


@pytest.mark.parametrize(
    "which, lay, state_dtype, fused",
    [
        ("a parameter", transposed, torch.float32, True),
        ("a parameter", transposed_in_place, BF16, False),
        ("its gradient", transposed, BF16, True),
        ("its gradient", transposed_in_place, torch.float32, False),
        ("exp_avg", transposed, torch.float32, False),
        ("exp_avg", transposed_in_place, BF16, True),
    ],
)
def test_a_tensor_that_lies_otherwise_at_the_same_address_is_seen(which, lay, state_dtype, fused):
    """Beside a twin that looks at everything, and one whose elements are never laid otherwise but copied."""
    results = []
    for road in ("remembers", "forgets", "copies"):
        params, optimizer, handle = made(more=beside(), fused=fused and road != "copies", state_dtype=state_dtype)
        square = params[SQUARE]
        for turn in range(6):
            give_gradients(optimizer, turn)
            if turn == 3:
                tensor = LAID[which](optimizer, square)
                if road == "copies":
                    tensor.data.copy_(tensor.data.t().clone())
                else:
                    lay(tensor)
                    assert not tensor.is_contiguous()
            if road == "forgets":
                handle.look_again()
            optimizer.step()
        results.append([square.detach(), *optimizer.state[square].values()])
    assert same(*results[:2])
    (weight, *state), _, (copied, *copied_state) = results
    assert nearly_equal(weight, copied, 1 + weight.numel() // 100)
    for one, other in zip(state, copied_state, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()  # BF16 state rounds either way
