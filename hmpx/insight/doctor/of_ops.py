"""What the ops that were seen say about the training, as problems; and settings and scalers, which belong to no op."""

from __future__ import annotations

from collections.abc import Iterator

from hmpx.insight.doctor.op_watch import OpWatch
from hmpx.insight.doctor.problem import Problem, percent, some
from hmpx.insight.doctor.scaling import Scaling
from hmpx.insight.doctor.spots import Spot
from hmpx.insight.doctor.writes import AVERAGED
from hmpx.insight.tensors import name as dtype_name
from hmpx.insight.text_table import number, short_place
from hmpx.ops.policies.catalog import canonical

_SETTLED = 5  # calls of a scaler after which it should have found its scale
_FP32 = "compute it in float32 (x.float()), or name it in a recipe's fp32 list: --fix recipe.yaml"
_FLOAT_BEFORE = "torch.finfo(x.dtype).min of the dtype that is masked, or a mask of bools"
_EMBEDDED = "keep positions in an integer dtype or float32 until they are embedded or turned into angles"
_ADDS_NOTHING = "a cumulative sum in low precision, to which its last elements add nothing"
_DIFFERENCE = (
    "a variance in low precision, as the difference of a mean of squares and a squared mean, cancels its digits"
)
_BCE = "binary_cross_entropy of probabilities in low precision, or that were: .999 is 1, with loss 100 and gradient 0"
_MASK = "a finite mask value becomes -inf in low precision, and a row in which all is masked NaN"
# By kind of spot: whether it is wrong, what is said of the ops, what to do, and its weight.
_SAID = {
    "loss": (True, "the loss is computed in low precision, with 3 significant digits or less", _FP32, 0.6),
    "log": (True, "logarithms in low precision, with 3 significant digits or less", _FP32, 0.35),
    "softmax": (False, "softmax of inputs in low precision", _FP32, 0.1),
    "cumulative sum": (True, _ADDS_NOTHING, _FP32, 0.5),
    "norm statistics": (False, "a norm's statistics in low precision", _FP32, 0.15),
    "variance by difference": (True, _DIFFERENCE, "x.float().var(), or --fix recipe.yaml", 0.55),
    "BCE": (True, _BCE, "binary_cross_entropy_with_logits", 0.6),
    "integers": (True, "positions or indices in low precision", _EMBEDDED, 0.65),
    "mask": (True, _MASK, _FLOAT_BEFORE, 0.4),
    "dtype": (
        False,
        "a stream in low precision turns into float32, in a dtype that nobody chose",
        "cast the parameter at its use, or keep it in the stream's dtype",
        0.2,
    ),
}


def of_ops(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    """The problems of the iterations that were looked at."""
    for kind, (wrong, said, do, weight) in _SAID.items():
        if spots := [*watch.spots.of(kind)]:
            yield _together(kind, wrong, said, do, weight, spots)
    for each in (_nonfinite, _fp16, _scaler):
        yield from each(watch, scaling)
    for view in (_casts, _writes, _accumulation, _products, _precision):
        yield from view(watch)


def _together(kind: str, wrong: bool, said: str, do: str, weight: float, spots: list[Spot]) -> Problem:
    """One problem for all lines of a kind."""
    ops = tuple(dict.fromkeys(_op(spot.op) for spot in spots if spot.op != "ones_like"))
    details = [spot.said for spot in spots if spot.said]
    lines = tuple(dict.fromkeys(short_place(spot.where) for spot in spots))
    calls = number(sum(spot.calls for spot in spots), "call")
    more = [f"{', '.join(ops)}, {calls}" if ops else "", details[0] if details else ""]
    more.append(f"also at {some(lines[1:], 2)}" if len(lines) > 1 else "")
    said = f"{said} ({'; '.join(filter(None, more))})" if any(more) else said
    modules = tuple(dict.fromkeys(spot.module for spot in spots if spot.module))
    listed = (*ops, "cross_entropy") if kind == "loss" else ops
    return Problem(kind, wrong, said, do, spots[0].where, modules, listed, weight)


def _op(name: str) -> str:
    """What a user calls an operator."""
    return canonical(name.strip("_").removesuffix("_forward"))


def _nonfinite(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    spot, op = watch.nonfinite.first, ""
    if spot is None or not watch.nonfinite.made_nan or (scaling.attempts and spot.values.get("backward")):
        return  # a GradScaler finds its scale so
    op, what = _op(spot.op), "a NaN" if spot.values.get("nan") else "an inf"
    said = f"{op} is the first op that makes {what} of finite numbers, {spot.said}"
    said += f", in {spot.module}" if spot.module else ""
    do = "compute it in float32" if spot.values.get("low") else "keep its input away from where it is not defined"
    yield Problem("inf or NaN", True, said, do, spot.where, (spot.module,) if spot.module else (), (op,), 0.97)


def _casts(watch: OpWatch) -> Iterator[Problem]:
    told: set[str] = set()
    for spot in watch.spots.of("cast up", "cast down"):
        back, used = spot.values.get("back", 0), spot.values.get("used", 0)
        dropped = spot.values.get("dropped", 0) == spot.calls
        if not (back or dropped) or used or spot.where in told:
            continue
        told.add(spot.where)
        times = number(int(back or spot.calls), "time")
        if dropped and spot.kind == "cast up":
            said = (
                f"{spot.said} is cast to float32 here, and nobody takes the result ({times}): the tensor stays as it is"
            )
            yield Problem("upcast", True, said, "x = x.float(); it does not work in place", spot.where, weight=0.3)
            continue
        if spot.kind == "cast up" and spot.values.get("autocast"):
            said = f"{spot.said} is cast to float32 here, and autocast casts all of it back: the upcast that was asked "
            said += f"for does not happen ({times})"
            wrong = "site-packages" not in spot.where  # a library casts to the dtype of its weights
            do = "leave autocast there: with torch.autocast(device, enabled=False)"
            yield Problem("upcast", wrong, said, do, spot.where, weight=0.3)
        elif spot.values.get("same_line"):
            low = spot.kind == "cast down"
            does = "rounds it to low precision and gains nothing" if low else "changes nothing and costs two casts"
            said = f"one line casts a tensor {'down and up' if low else 'up and down'} again, which {does} ({times})"
            yield Problem("casts there and back", False, said, "take both casts away", spot.where, weight=0.05)


def _writes(watch: OpWatch) -> Iterator[Problem]:
    lines: dict[str, list[Spot]] = {}
    for spot in watch.spots.of("write"):
        lines.setdefault(spot.where, []).append(spot)
    for where, spots in lines.items():
        worst = max(spots, key=lambda spot: spot.values.get("lost", 0) / max(spot.values.get("updates", 0), 1))
        updates, lost, op = worst.values.get("updates", 0), worst.values.get("lost", 0), _op(worst.op)
        if worst.values.get("elements") == worst.values.get("tensors") and lost > 0.5 * updates:
            said = (
                f"{op} leaves a single number in {worst.said} as it is, and would not in float32: a learning rate, a "
            )
            said += "loss scale or a running sum that stands still"
            yield Problem(
                "running value", True, said, "keep it in a Python float, or in float32", where, (), (op,), 0.4
            )
        elif updates >= 8 and lost > 0.5 * updates:
            said = (
                f"{op} loses {percent(lost / updates)} of what it should add to a tensor in {worst.said}: an average "
            )
            said += "(EMA) that does not move, or a step by hand that does nothing"
            do = "keep the average in float32, or take torch.optim.swa_utils.AveragedModel under hmpx"
            if AVERAGED in worst.said:
                do = "hmpx.attach(optimizer), or --fix recipe.yaml, which rounds it stochastically"
            yield Problem("average of weights", True, said, do, where, (), (op,), 0.7)


def _accumulation(watch: OpWatch) -> Iterator[Problem]:
    seen = watch.accumulation
    if seen.most > 1 and seen.size and seen.dtype is not None:
        error = (seen.error / seen.size) ** 0.5
        said = f"gradients of {seen.most} backward passes are accumulated in {dtype_name(seen.dtype)}: they are off by "
        said += f"{percent(error)}, and each of many passes adds less"
        do = "accumulate in float32: use_fp32_grad_acc in hmpx.attach, or --fix recipe.yaml"
        yield Problem("gradient accumulation", error > 0.01, said, do, weight=min(0.2 + error, 0.8))


def _fp16(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    seen = watch.underflow
    if seen.values and not scaling.attempts:
        share = seen.tiny / seen.values
        said = f"FP16 without a GradScaler: {percent(share)} of the gradients that are not zero are beneath its normal "
        do = 'torch.amp.GradScaler("cuda"), or BF16, which needs none'
        yield Problem("loss scaling", share > 0.01, f"{said}numbers", do, weight=0.3 + 0.5 * share)


def _scaler(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    skipped, of = scaling.late
    if of >= _SETTLED and 2 * skipped >= of:
        said = f"GradScaler has skipped {skipped} of the last {of} steps, and its scale is down to {scaling.scale:g}: "
        do = "look for the first op that makes them (doctor --at 3), or use BF16, which needs no scale"
        yield Problem("GradScaler", True, f"{said}gradients are inf or NaN at any scale", do, weight=0.9)


def _products(watch: OpWatch) -> Iterator[Problem]:
    if not (watch.autocast and watch.wide_share > 0.1):
        return
    spots = sorted(watch.spots.of("wide product"), key=lambda spot: -spot.amount)
    modules = tuple(dict.fromkeys(spot.module or short_place(spot.where) for spot in spots))
    said = f"{percent(watch.wide_share)} of the products of the forward pass ran in float32, outside of autocast: "
    do = "call them inside of torch.autocast, unless they are in float32 for a reason"
    yield Problem("autocast", False, said + some(modules), do, spots[0].where, modules, weight=0.15)


def _precision(watch: OpWatch) -> Iterator[Problem]:
    precision = watch.precision
    if watch.wide_products and (precision == "medium" or (precision == "high" and "cuda" in watch.devices)):
        digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
        said = (
            f'float32_matmul_precision is "{precision}": products in float32, {percent(watch.wide_share)} of all, may '
        )
        do = 'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason'
        yield Problem("matmul precision", False, f"{said}keep {digits} of each number", do, weight=0.1)
