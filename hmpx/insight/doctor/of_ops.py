"""What the ops that were seen say about the training, as problems."""

from __future__ import annotations

from collections.abc import Iterator

from hmpx.insight.doctor.op_watch import OpWatch
from hmpx.insight.doctor.problem import Problem, percent, some
from hmpx.insight.doctor.scaling import Scaling
from hmpx.insight.doctor.spots import Spot
from hmpx.insight.recording.words import number, short_place
from hmpx.ops.catalog import canonical

_FP32 = "compute it in float32 (x.float()), or name it in a recipe's fp32 list: --fix recipe.yaml"
# By kind of spot: whether it is wrong, what is said of the ops, what to do, and its weight.
_SAID = {
    "loss": (True, "the loss is computed in low precision, with 3 significant digits or less", _FP32, 0.6),
    "log": (True, "logarithms in low precision, with 3 significant digits or less", _FP32, 0.35),
    "softmax": (False, "softmax of inputs in low precision", _FP32, 0.1),
    "cumulative sum": (True, "a cumulative sum in low precision, to which its last elements add nothing", _FP32, 0.5),
    "norm statistics": (False, "a norm's statistics in low precision", _FP32, 0.15),
    "variance by difference": (
        True,
        "a variance in low precision, as the difference of a mean of squares and a squared mean: the leading digits "
        "cancel",
        "x.float().var(), or --fix recipe.yaml",
        0.55,
    ),
    "BCE": (
        True,
        "binary_cross_entropy of probabilities in low precision: .999 is 1, with loss 100 and gradient 0",
        "binary_cross_entropy_with_logits",
        0.6,
    ),
    "integers": (
        True,
        "positions or indices in low precision",
        "keep positions in an integer dtype or float32 until they are embedded or turned into angles",
        0.65,
    ),
    "mask": (
        True,
        "a finite mask value becomes -inf in low precision, and a row in which all is masked NaN",
        "torch.finfo(x.dtype).min of the dtype that is masked, or a mask of bools",
        0.4,
    ),
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
        spots = list(watch.spots.of(kind))
        if spots:
            yield _together(kind, wrong, said, do, weight, spots)
    yield from _nonfinite(watch, scaling)
    yield from _casts(watch)
    yield from _writes(watch)
    yield from _accumulation(watch)
    yield from _fp16(watch, scaling)
    yield from _products(watch)


def _together(kind: str, wrong: bool, said: str, do: str, weight: float, spots: list[Spot]) -> Problem:
    """One problem for all lines of a kind."""
    ops = tuple(dict.fromkeys(_op(spot.op) for spot in spots if spot.op != "ones_like"))
    details = [spot.said for spot in spots if spot.said]
    calls = sum(spot.calls for spot in spots)
    lines = tuple(dict.fromkeys(short_place(spot.where) for spot in spots))
    more = [f"{', '.join(ops)}, {number(calls, 'call')}" if ops else "", details[0] if details else ""]
    more.append(f"also at {some(lines[1:], 2)}" if len(lines) > 1 else "")
    modules = tuple(dict.fromkeys(spot.module for spot in spots if spot.module))
    return Problem(
        kind,
        wrong,
        f"{said} ({'; '.join(filter(None, more))})" if any(more) else said,
        do,
        spots[0].where,
        modules,
        _listed(ops) if kind != "loss" else (*_listed(ops), "cross_entropy"),
        weight,
    )


def _op(name: str) -> str:
    """What a user calls an operator."""
    return canonical(name.strip("_").removesuffix("_forward"))


def _listed(ops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ops))


def _nonfinite(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    spot = watch.nonfinite.first
    if (
        spot is None or not watch.nonfinite.made_nan or (scaling.attempts and spot.values.get("backward"))
    ):  # a GradScaler finds its scale so
        return
    what = "a NaN" if spot.values.get("nan") else "an inf"
    yield Problem(
        "inf or NaN",
        True,
        f"{_op(spot.op)} is the first op that makes {what} of finite numbers, {spot.said}"
        + (f", in {spot.module}" if spot.module else ""),
        "compute it in float32" if spot.values.get("low") else "keep its input away from where it is not defined",
        spot.where,
        (spot.module,) if spot.module else (),
        (_op(spot.op),),
        0.97,
    )


def _casts(watch: OpWatch) -> Iterator[Problem]:
    told: set[str] = set()
    for spot in watch.spots.of("cast up", "cast down"):
        back, used = spot.values.get("back", 0), spot.values.get("used", 0)
        if not back or used or spot.where in told:
            continue
        told.add(spot.where)
        if spot.kind == "cast up" and spot.values.get("autocast"):
            yield Problem(
                "upcast",
                "site-packages" not in spot.where,  # a library casts to the dtype of its weights
                f"{spot.said} is cast to float32 here, and autocast casts all of it back: the upcast that was asked "
                f"for does not happen ({number(int(back), 'time')})",
                "leave autocast there: with torch.autocast(device, enabled=False)",
                spot.where,
                weight=0.3,
            )
        elif spot.values.get("same_line"):
            low = spot.kind == "cast down"
            does = "rounds it to low precision and gains nothing" if low else "changes nothing and costs two casts"
            yield Problem(
                "casts there and back",
                False,
                f"one line casts a tensor {'down and up' if low else 'up and down'} again, which {does} "
                f"({number(int(back), 'time')})",
                "take both casts away",
                spot.where,
                weight=0.05,
            )


def _writes(watch: OpWatch) -> Iterator[Problem]:
    lines: dict[str, list[Spot]] = {}
    for spot in watch.spots.of("write"):
        lines.setdefault(spot.where, []).append(spot)
    for where, spots in lines.items():
        worst = max(spots, key=lambda spot: spot.values.get("lost", 0) / max(spot.values.get("updates", 0), 1))
        updates, lost = worst.values.get("updates", 0), worst.values.get("lost", 0)
        if updates >= 8 and lost > 0.5 * updates:
            yield Problem(
                "average of weights",
                True,
                f"{_op(worst.op)}_ in place loses {percent(lost / updates)} of what it should add to a tensor in "
                f"{worst.said}: an average (EMA) that does not move, or a step by hand that does nothing",
                "keep the average in float32, or take torch.optim.swa_utils.AveragedModel under hmpx, which rounds it "
                "stochastically",
                where,
                ops=(_op(worst.op),),
                weight=0.7,
            )


def _accumulation(watch: OpWatch) -> Iterator[Problem]:
    seen = watch.accumulation
    if seen.most > 1 and seen.size:
        error = (seen.error / seen.size) ** 0.5
        dtype = str(seen.dtype).removeprefix("torch.")
        yield Problem(
            "gradient accumulation",
            error > 0.01,
            f"gradients of {seen.most} backward passes are accumulated in {dtype}: they are off by {percent(error)}, "
            "and each of many passes adds less",
            "accumulate in float32: use_fp32_grad_acc in hmpx.attach, or --fix recipe.yaml",
            weight=min(0.2 + error, 0.8),
        )


def _fp16(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    seen = watch.underflow
    if seen.values and not scaling.attempts:
        share = seen.tiny / seen.values
        yield Problem(
            "loss scaling",
            share > 0.01,
            f"FP16 without a GradScaler: {percent(share)} of the gradients that are not zero are beneath its normal "
            "numbers",
            'torch.amp.GradScaler("cuda"), or BF16, which needs none',
            weight=0.3 + 0.5 * share,
        )


def _products(watch: OpWatch) -> Iterator[Problem]:
    every = watch.low_products + watch.wide_products
    if not (watch.autocast and watch.wide_products > 0.1 * every):
        return
    spots = sorted(watch.spots.of("wide product"), key=lambda spot: -spot.amount)
    modules = tuple(dict.fromkeys(spot.module or short_place(spot.where) for spot in spots))
    yield Problem(
        "autocast",
        False,
        f"{percent(watch.wide_products / every)} of the products of the forward pass ran in float32, outside of "
        f"autocast: {some(modules)}",
        "call them inside of torch.autocast, unless they are in float32 for a reason",
        spots[0].where,
        modules,
        weight=0.15,
    )
