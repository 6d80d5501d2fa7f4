"""In which dtype numbers come to an op, and what an op passes on.

In which precision products run; casts in vain; tables of positions and data that were rounded before an op reads them;
and what the evidence in a later op (`checks`) rests on.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_name, tensors_in
from hmpx.base.torch_private import base_of, version_of
from hmpx.insight.dispatch import Look, OpLook, in_autocast, sampled
from hmpx.insight.finding import Finding, Names, first_names, percent, short_place
from hmpx.insight.notes import NotedSite, Notes, OpCall, Place
from hmpx.insight.report import number
from hmpx.insight.tensors import EXACT_UP_TO, LOW, Tensor, low_dtype, memory, ulp
from hmpx.ops.computing.kernels import is_of_fp32_kernel
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_WIDE = torch.float32
OFF = 0.29  # the standard deviation of what rounding is off by, in units of a last digit
MATMULS = frozenset(
    "mm addmm bmm baddbmm addmv mv dot convolution mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable".split()
)


def look_at_products(notes: Notes, op: OpCall) -> None:
    """Count the FLOPs of matrix products of the forward pass, by precision."""
    if op.name not in MATMULS or not op.results or not op.trains:
        return
    if op.name == "convolution":
        flops = 2 * op.out.numel() * math.prod(op.given[1].shape[1:])  # groups are left out
    else:
        inner = op.given[1] if op.name in ("addmm", "baddbmm", "addmv") else op.given[0]
        flops = 2 * op.out.numel() * (inner.shape[-1] if inner.dim() else 1)
    if op.out.dtype in LOW:
        half = op.out.dtype is torch.float16
        notes.note("product in low", op, flops=flops, autocast=in_autocast(op.out), half=half)
    elif op.out.dtype is _WIDE:
        notes.note("product", op, _precision(op.out), flops=flops, gpu=op.out.is_cuda)


def _precision(out: torch.Tensor) -> str:
    """Return which of "highest", "high" and "medium" holds on a device: torch has a switch for all, and newer ones."""
    backend = torch.backends.cuda if out.is_cuda else torch.backends.mkldnn
    own = getattr(getattr(backend, "matmul", None), "fp32_precision", "none")
    if (known := {"ieee": "highest", "tf32": "high", "bf16": "medium"}.get(own)) is not None:
        return known
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switches say something else of another device
        return "highest"


def are_low_by_hand(notes: Notes) -> bool:
    """Return whether the program itself, without torch.autocast, computes products in low precision."""
    sites = notes.sites("product in low")
    return bool(sites) and not any(site.numbers["autocast"] for site in sites)


def autocast_dtype(notes: Notes) -> torch.dtype | None:
    """Return the dtype of the products in the program's own torch.autocast; None if there are none."""
    sites = [site for site in notes.sites("product in low") if site.numbers["autocast"]]
    return (torch.float16 if any(site.numbers["half"] for site in sites) else torch.bfloat16) if sites else None


def of_products(notes: Notes, names: Names) -> Iterator[Finding]:
    low, wide = notes.sites("product in low"), notes.sites("product")
    flops = [sum(site.numbers["flops"] for site in sites) for sites in (low, wide)]
    share = flops[1] / (sum(flops) or 1)
    if any(site.numbers["autocast"] for site in low) and share > 0.1:
        sites = sorted(wide, key=lambda site: -site.numbers["flops"])
        modules = tuple(dict.fromkeys(site.module or short_place(site.where) for site in sites))
        said = f"{percent(share)} of the products of the forward pass ran in float32, outside of autocast: "
        do = "call them inside of torch.autocast, unless they are in float32 for a reason"
        yield Finding("autocast", False, said + first_names(modules), do, sites[0].where, modules, weight=0.15)
    precision = wide[0].said if wide else ""
    if precision == "medium" or (precision == "high" and any(site.numbers["gpu"] for site in wide)):
        digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
        said = f'float32_matmul_precision is "{precision}": products in float32, {percent(share)} of all, may keep '
        do = 'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason'
        yield Finding("matmul precision", False, f"{said}{digits} of each number", do, weight=0.1)


PRODUCTS = OpLook(look_at_products, of_products, "forward")


# Casts in vain: there and back, with a result that nobody reads, or of parameters that are cast down again


def _is_cast(op: OpCall) -> bool:
    if op.name != "_to_copy" or not len(op.given) == len(op.results) == 1:
        return False
    before, after = op.given[0].dtype, op.out.dtype
    return (before in LOW and after is _WIDE) or (before is _WIDE and after in LOW)


def look_at_casts(notes: Notes, op: OpCall) -> None:
    """Follow the result of a cast to the ops that read it."""
    if notes.last_cast is not None:
        result, site = notes.last_cast
        site.numbers["dropped"] += result() is None
        notes.last_cast = None
    is_cast = _is_cast(op) and not is_of_fp32_kernel(op.frame)  # which no line asks for
    for tensor in op.given if not op.is_view else ():
        if (cast := notes.facts(tensor).get("cast")) is not None:
            before, site = cast
            if is_cast and op.out.dtype is before:
                back = notes.note("cast back", op)
                site.numbers.update({"back": 1, "same_line": back.place.where == site.place.where})
            else:
                site.numbers["used"] += 1
    if op.stage == "forward" and is_cast and op.out.numel() > 1 and not isinstance(op.given[0], Parameter):
        before, kind = op.given[0].dtype, "cast up" if op.out.dtype is _WIDE else "cast down"
        site = notes.note(kind, op, dtype_name(before), autocast=in_autocast(op.out))
        notes.add(op.out, cast=(before, site))
        notes.last_cast = weakref.ref(op.out), site


def of_casts(notes: Notes, names: Names) -> Iterator[Finding]:
    told: set[str] = set()
    for site in notes.sites("cast up", "cast down"):
        numbers, up = site.numbers, site.kind == "cast up"
        dropped = numbers["dropped"] == site.calls
        if not (numbers["back"] or dropped) or numbers["used"] or site.place.where in told:
            continue
        told.add(site.place.where)
        times = f"{number(numbers['back'] or site.calls, 'time')}{site.place.within}"
        if dropped and up:
            said = f"{site.said} is cast to float32 here, and nobody uses the result ({times})"
            do = "x = x.float(), if it is to be in float32: that does not work in place"
            yield Finding("upcast", False, said, do, site.where, weight=0.15)
        elif up and numbers["autocast"]:
            said = f"{site.said} is cast to float32 here, and autocast casts all of it back ({times})"
            device = next((p.device.type for p in names), "cuda")
            do = f'leave autocast there: with torch.autocast("{device}", enabled=False)'
            yield Finding("upcast", False, said, do, site.where, weight=0.15)
        elif numbers["same_line"]:
            does = "changes nothing and costs two casts" if up else "rounds it to low precision and gains nothing"
            said = f"one line casts a tensor {'up and down' if up else 'down and up'} again, which {does} ({times})"
            yield Finding("casts there and back", False, said, "take both casts away", site.where, weight=0.05)


@dataclass
class _Upcast:
    """The cast of a parameter to FP32. used: whether an op read the result. lowered: whether it was cast down since."""

    parameter: weakref.ref[Parameter]
    result: weakref.ref[Tensor]
    site: NotedSite
    used: bool = False
    lowered: bool = False


CASTS = OpLook(look_at_casts, of_casts, "forward", "backward", "step")


class EarlyUpcasts(Look):
    """Follows parameters that are cast to FP32 before the training begins, and are not in FP32 then."""

    def __init__(self) -> None:
        self._casts: list[_Upcast] = []
        self._dropped: list[tuple[NotedSite, Parameter]] = []

    stages = ("set up",)

    def see(self, notes: Notes, op: OpCall) -> None:
        for cast in self._casts:
            cast.used |= any(cast.result() is tensor for tensor in op.given)
            cast.lowered |= bool(op.given and op.results) and cast.parameter() is op.given[0] and op.out.dtype in LOW
        if _is_cast(op) and isinstance(op.given[0], Parameter) and op.out.dtype is _WIDE:
            site = notes.note("upcast", op, dtype_name(op.given[0].dtype))
            self._casts.append(_Upcast(weakref.ref(op.given[0]), weakref.ref(op.out), site))

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        """Note which parameters, now at the first step, were to be FP32 and are not.

        A model that was cast to FP32 and back as a whole was cast on purpose.
        """
        low = {p for p in parameters(optimizer) if p.dtype in LOW}
        found = [(each, p) for each in self._casts if (p := each.parameter()) in low and p is not None]
        found = [(each, p) for each, p in found if not each.used and each.result() is None]
        whole = {p for each, p in found if each.lowered} == low
        self._dropped += [(each.site, p) for each, p in found if not (whole and each.lowered)]

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        if self._dropped:
            site, which = self._dropped[0][0], tuple(dict.fromkeys(names[p] for _, p in self._dropped))
            was, still = ("was", "is") if len(which) == 1 else ("were", "are")
            said = f"{first_names(which)} {was} to be float32 here, and {still} still in {site.said} at the first step"
            do = "module.float() after all other casts and before the optimizer is made; tensor.float() does not work "
            yield Finding("upcast", False, said, f"{do}in place", site.where, which, weight=0.2)


# Tables of positions and data that were rounded before an op reads them: in a first forward pass, in a file. Above 256
# not every whole number is one of BF16, so neighbours in a table of BF16 positions are the same, and so are their
# angles and sines. A table whose neighbours are equal exactly where those of BF16 (or FP16) positions are was made of
# these, whatever was computed of them. FP32 data that were in low precision have the grid of its numbers.

_ENOUGH = 64  # neighbours that are as those of rounded positions by no accident
_COLUMNS = 64  # that are looked at, at most
_ROWS = 256  # of data, likewise
_ODD = 0.01  # a share that is no accident
_LEAST = 0.02  # of what data vary by: less harms nothing
_STARTS = (0, 1, 2)  # numbers that positions count from
_DTYPES = frozenset({*LOW, torch.float32})


class PositionTables(Look):
    """Looks at the tensors that an iteration reads and has not made."""

    stages = ("forward", "backward")

    def __init__(self) -> None:
        self._iteration = 0
        self._made = set[int]()  # addresses
        self._computed = set[int]()  # addresses of gradients, and of what is made of these or of weights
        self._asked: dict[int, StorageWeakRef] = {}
        self._grids: dict[int, StorageWeakRef] = {}

    def see(self, notes: Notes, op: OpCall) -> None:
        if notes.iteration != self._iteration:
            self._iteration = notes.iteration
            self._made.clear()
            self._computed.clear()
        if op.is_view:
            return
        given = {memory(each) for each in op.given}
        is_data = op.stage == "forward" and self._computed.isdisjoint(given) and not notes.are_weights(given)
        if not is_data:
            self._computed.update(memory(each) for each in op.results)
        if op.stage != "forward":
            return
        written = {memory(each) for each in op.schema.targets(op.args, op.kwargs)} if op.schema.written else ()
        for each in op.given:
            whole = base_of(each) if each.dim() else None
            table = each if whole is None or whole.dtype is not each.dtype else whole
            count = next((n for n in table.shape if n > 1), 1)
            if memory(table) not in self._made and memory(table) not in written:
                self._ask_grid(notes, op, table)
            if count > EXACT_UP_TO[torch.bfloat16] + _ENOUGH and not table.requires_grad and table.dtype in _DTYPES:
                self._ask(notes, op, table, each, count)
        is_cast = op.name == "_to_copy" and op.given and op.results and op.given[0].dtype in LOW
        if is_cast and is_data and not op.trains:  # a line of this iteration rounds them
            self._ask_grid(notes, op, op.out)
        self._made.update(memory(each) for each in op.results if each.dtype in _DTYPES)

    def _ask(self, notes: Notes, op: OpCall, table: Tensor, read: Tensor, count: int) -> None:
        at = memory(table)
        if at in self._made or _is_known(self._asked, table):
            return
        rows_read = [int(t.max()) for t in tensors_in(op.args) if t.dtype in (torch.int64, torch.int32) and t.numel()]
        end = read.storage_offset() + sum((n - 1) * step for n, step in zip(read.shape, read.stride(), strict=True))
        last = max(rows_read) if rows_read else end * count // table.numel()  # the last row that is read
        for dtype in LOW:
            exact = EXACT_UP_TO[dtype]
            if count <= exact + _ENOUGH or last <= exact:
                continue  # rows that are read are exact
            self._asked[at] = StorageWeakRef(table.untyped_storage())
            rows = table.reshape(count, -1)[: 2 * exact, :_COLUMNS]
            same = rows[1:] == rows[:-1]
            same = torch.cat([same, same.all(1, keepdim=True)], 1)  # in one column, or in all together
            for start in _STARTS:
                alike = _alike(dtype, start, len(rows)).to(same.device)
                if bool((same == alike[:, None]).all(0).any()):
                    said = f"{int(alike.sum())} of {len(rows)} rows of a table are the same as the one before, as "
                    notes.note("table", op, f"{said}positions in {dtype_name(dtype)} are")

    def _ask_grid(self, notes: Notes, op: OpCall, table: Tensor) -> None:
        """Note data of so few numbers of BF16 or FP16 that their rounding is a part of what they vary by."""
        is_data = table.dtype is torch.float32 and not table.requires_grad and table.numel() >= _ENOUGH
        if not is_data or _is_known(self._grids, table):
            return
        self._grids[memory(table)] = StorageWeakRef(table.untyped_storage())
        if low_dtype(sampled(table)) is None:
            return
        rows = table.detach().reshape(-1, table.shape[-1] if table.shape[-1] <= _COLUMNS else 1)
        rows = rows[:: max(len(rows) // _ROWS, 1)]
        is_whole = torch.equal(rows, rows.round())
        for dtype in LOW:
            size = ulp(rows, dtype)
            odd = ((rows / size) % 2 == 1).float().mean()  # some of the numbers of a grid are an odd number of steps
            spread = (rows - rows.mean(0)).square().sum().sqrt()
            off = float((OFF * size).square().sum().sqrt() / spread)
            is_exact = is_whole and float(rows.abs().max()) <= EXACT_UP_TO[dtype]
            if low_dtype(rows) is dtype and not is_exact and odd > _ODD and _LEAST < off < math.inf:
                apart = float(size.median())
                said = f"{dtype_name(dtype)}, where these are {apart:.2g} apart: that is {percent(min(off, 1))} of"
                notes.follow(op, {notes.note("data", op, said)})

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        for site in notes.sites("data"):
            said = f"float32 data hold numbers of {site.said} what they vary by"
            said += f"{'' if site.is_read else '; no gradient depends on it'}{site.place.within}"
            do = "make and keep them in float32; or subtract what all of them have in common before they are rounded"
            yield Finding("rounded data", site.is_read, said, site.advice(do), site.where, weight=0.5)
        for site in notes.sites("table") if not notes.sites("integers") else ():  # which names where it is made
            said = f"positions in low precision ({site.said}; it is read here)"
            do = "make the table of positions in float32 or in an integer dtype, outside of autocast"
            yield Finding("integers", True, said + site.place.within, site.advice(do), site.where, (), (), 0.65)


def _is_known(known: dict[int, StorageWeakRef], table: Tensor) -> bool:
    held = known.get(memory(table))
    return held is not None and not held.expired()


@functools.cache
def _alike(dtype: torch.dtype, start: int, count: int) -> Tensor:
    """Return which of some positions are equal to the one before, once they are rounded."""
    positions = torch.arange(start, start + count).to(dtype)
    return positions[1:] == positions[:-1]


# What an op passes on: facts of its result

SAMPLED = 1 << 20  # elements: of a larger input, a sample is looked at
_SUMS, _FACTORS = ("add", "sub", "rsub"), ("mul", "div", "neg", "_to_copy")


def hand_on(op: OpCall, notes: Notes) -> None:
    """Note what the evidence in a later op rests on, as facts of the result.

    moment: "square", "mean", "mean of square" or "square of mean".
    product: how many sums of squares were added to a product in low precision; and the size of the product.
    squares: how many sums of squares were added up.
    rounded: the op that has rounded probabilities to low precision, and its place.
    exact: a function that returns it as FP32 would have made it; None if what it was made of is gone.
    """
    if not op.results:
        return
    if moment := _moment(op, notes.facts(op.given[0]).get("moment", "") if op.given else ""):
        notes.add(op.out, moment=moment, exact=_later(op, notes))
    if (product := _product(op, notes)) is not None:
        notes.add(op.out, product=product)
    elif squares := _squares(op, notes):
        notes.add(op.out, squares=squares)
    if (rounded := _rounded(op, notes)) is not None:
        can_be_repeated = op.out.numel() <= SAMPLED and not op.schema.written
        exact = _later(op, notes)() if can_be_repeated else None
        notes.add(op.out, rounded=rounded, **({} if exact is None else {"exact": lambda: exact}))
    elif op.name == "_to_copy" and op.out.dtype in LOW and op.given and op.given[0].dtype is torch.float32:
        notes.add(op.out, exact=_as_it_is(op.given[0]))


def _as_it_is(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that returns a tensor, and None if it is gone or was written to."""
    there, version = weakref.ref(tensor), version_of(tensor)

    def unchanged() -> Tensor | None:
        found = there()
        return found if found is not None and version_of(found) == version else None

    return unchanged


def _later(op: OpCall, notes: Notes) -> Callable[[], Tensor | None]:
    """Return a function that repeats an op in FP32, and returns None if a tensor that it reads is gone."""

    def source(value: Any) -> Any:
        if isinstance(value, Tensor):
            return notes.facts(value).get("exact", _as_it_is(value))
        return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value

    func, args, kwargs = op.func, [*map(source, op.args)], {key: source(value) for key, value in op.kwargs.items()}

    def again() -> Tensor | None:
        given = [each() if callable(each) else each for each in args]
        if any(each is None and callable(made) for each, made in zip(given, args, strict=True)):
            return None
        return func(*(each.detach().float() if isinstance(each, Tensor) else each for each in given), **kwargs)

    return again


def _moment(op: OpCall, before: str) -> str:
    """Return what an op makes of a moment: "square", "mean", "mean of square", "square of mean", or "" for none."""
    if op.name in ("mean", "sum") and before == "square":
        return "mean of square"
    if op.name == "mean" or (op.name == "sum" and not before):
        return "mean"
    if op.name == "div":
        return "" if before == "square of mean" else before
    squares = op.name == "square" or (op.name == "mul" and op.args[0] is op.args[1])
    if squares or (op.name == "pow" and isinstance(op.args[1], int | float) and op.args[1] == 2):
        return "square of mean" if before == "mean" else "square"
    return ""


def _product(op: OpCall, notes: Notes) -> tuple[int, float] | None:
    """Return how many squares were added to a product in low precision, and its last digit; None for anything else."""
    if op.name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
        if op.out.dtype not in LOW:
            return None
        squares, size = _squares(op, notes), float(op.out.float().square().mean().sqrt())
        if squares:  # addmm rounds them, which are as large as its product; its result may be small
            a, b = (each.detach().float().square() for each in op.given[-2:])
            norms = float(a.sum(-1).mean() * b.sum(-2).mean()) ** 0.5
            size = max(size, squares / 2 * abs(op.kwargs.get("alpha", 1)) * norms)
        return squares, torch.finfo(op.out.dtype).eps * size
    known = [notes.facts(each).get("product") for each in op.given[:2]]
    which = next((each for each in known if each is not None), None)
    if which is None or op.name.rstrip("_") in _FACTORS:
        factor = abs(op.scalars[0]) if op.name.startswith(("mul", "div")) and op.scalars else 1.0
        factor = 1 / factor if op.name.startswith("div") and factor else factor
        return which and (which[0], which[1] * factor)
    squares = _squares(op, notes)
    return (which[0] + squares, which[1]) if squares and op.name.rstrip("_") in _SUMS else None


def _squares(op: OpCall, notes: Notes) -> int:
    """Return how many sums of squares an op adds up: a^2 + b^2 are two, in any order beside a product."""
    name = op.name.rstrip("_")
    terms = (
        2 if name in _SUMS else 1 if name in ("addmm", "baddbmm") or (name in _FACTORS and len(op.given) == 1) else 0
    )
    facts = [notes.facts(each) for each in op.given[:terms]]
    return sum(each.get("squares", int(each.get("moment") == "mean of square")) for each in facts)


def _rounded(op: OpCall, notes: Notes) -> tuple[str, Place] | None:
    """Return the op that has made probabilities in low precision, of which this makes others, and its place.

    There .999 is 1, and the logarithm of 1 - p is -inf.
    """
    if op.name in ("sigmoid", "_softmax"):
        return (op.name.strip("_"), notes.place(op.frame)) if op.out.dtype in LOW else None
    known = (notes.facts(each).get("rounded") for each in op.given[:2])
    return next(filter(None, known), None) if op.name in ("rsub", "sub", "add", "mul", "clamp", "_to_copy") else None
