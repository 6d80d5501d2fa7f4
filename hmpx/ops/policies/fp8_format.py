"""FP8 and FP4: the format of an fp8 list, one readable object by name or by keys, and the casts of an operand to it.

A cast gives codes, and scales that decode them.

**Scales.** Numbers that share a scale are divided by it, and the largest of them becomes the largest number of the
format. If one of them is inf or NaN, all of them become NaN. torch's own cast to e4m3 on a CPU turns inf into 448, and
nobody would see it.

**Four bits.** e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives; no inf and no NaN. All are numbers of
e4m3, in whose codes they are held, and a NaN as e4m3's.

**Stochastic rounding.** Neighbours in e2m1 lie far apart, and most numbers of a gradient lie between two of them.
Rounding to nearest would move a number in the same direction at each step, and the training would follow that error. So
a number is rounded up with a probability: its distance from the lower neighbour, over the distance of both. The random
numbers are those of `hmpx.rounding.stochastic`, the same on every rank and device. Their name says for which product
the gradient is cast and how many columns it has. Their index is that of the element in the gradient. Their step counts
the gradients of this name that were cast since `convert`, because a backward pass knows no optimizer's step; a resumed
run counts from 0 again. A checkpoint that repeats a forward pass casts no gradient there.

**Random Hadamard.** One outlier takes the scale of its block and makes the others zeros. The gradient of a weight sums
over tokens. An orthogonal matrix between its two operands changes nothing, and spreads an outlier over 16 tokens.

Sources: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); torchao 0.18, `nvfp4_quantize`, for
the order of operations in scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.errors import HmpxError, did_you_mean
from hmpx.rounding.shared import Span
from hmpx.rounding.stochastic import random_numbers

Tensor = torch.Tensor
aten = torch.ops.aten
# What holds the codes of each kind of element. Every number of e2m1 is one of e4m3.
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float8_e4m3fn}
BLOCK_OF = {"blockwise": 128, "mx": 32, "nvfp4": 16}  # elements that share a scale, along the dimension of the sum
SCALINGS = ("tensorwise", "rowwise", *BLOCK_OF)
PRODUCTS = ("output", "input_gradient", "weight_gradient")
# Where torchao's filter leaves a layer in BF16 as too small to gain: K and N both at most these (None: any). Source:
# torchao 0.14, `float8_linear_utils._auto_filter_for_recipe`; its figures are of an H100.
SMALL: dict[str, tuple[tuple[int | None, int | None], ...]] = {
    "tensorwise": ((4096, 1024),),
    "rowwise": ((None, 2048), (1024, None), (2048, 4096)),
}


@dataclass(frozen=True)
class Format:
    """How the operands of a product are brought to FP8 or FP4, and which products are.

    Attributes:
        scaling: who shares a scale: "tensorwise", "rowwise" (a row along the sum), "blockwise" (128 along the sum; of a
            weight 128 x 128), "mx" (32 along the sum, a power of two), "nvfp4" (16 along the sum, a number of e4m3,
            beside one scale in FP32 for the tensor).
        forward, backward: "e4m3", "e5m2" or, of four bits, "e2m1"; of inputs and weights, and of gradients.
        products: which of the output, the gradient of the input and that of the weight are in FP8; the others are in
            low precision. Of two inputs the second is the weight.
        power_of_two: scales are rounded to powers of two, so that no value grows beyond the format; "mx" always is.
        rceil: of "mx", whether a scale is rounded up, so that nothing saturates; else it is that of the exponent.
        saturating: a number beyond the format's largest becomes that; else NaN, in e5m2 inf.
        weight_tensorwise: the weight has one scale in the gradient of the input.
        auto_filter: layers that torchao's filter takes for too small to gain stay in low precision.
        squares: blocks of a weight are as high as wide, so that both products with it have the same numbers of it;
            "blockwise" always has them.
        stochastic: gradients in e2m1 are rounded stochastically.
        hadamard: both operands of the gradient of the weight are mixed before they are cast: each 16 numbers along the
            sum by a Hadamard matrix with random signs, which leaves their product as it is and spreads an outlier.

    Example:
        >>> recipe = hmpx.Recipe(fp8=("linear",), fp8_format={"scaling": "rowwise", "backward": "e4m3"})
        >>> form = recipe.policy().fp8_format
        >>> form.power_of_two, str(form)
        (False, 'rowwise e4m3')
    """

    scaling: str = "tensorwise"
    forward: str = "e4m3"
    backward: str = "e5m2"
    products: tuple[str, ...] = PRODUCTS
    power_of_two: bool = False
    rceil: bool = True
    saturating: bool = True
    weight_tensorwise: bool = False
    auto_filter: bool = False
    squares: bool = False
    stochastic: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "products", tuple(self.products))
        elements = ("e2m1",) if self.scaling == "nvfp4" else tuple(DTYPES)
        legal: dict[str, tuple] = {"scaling": SCALINGS, "forward": elements, "backward": elements}
        for key in (each.name for each in fields(self) if each.type == "bool"):
            legal[key] = (True, False)
        for key, words in legal.items():
            _check(key, getattr(self, key), words)
        for product in self.products:
            _check("products", product, PRODUCTS)
        in_blocks, has_e2m1 = self.scaling in BLOCK_OF, "e2m1" in (self.forward, self.backward)
        for is_wrong, why in (
            (self.auto_filter and in_blocks, f"auto_filter: torchao has none for {self.scaling} scales"),
            (self.power_of_two and self.scaling == "nvfp4", "power_of_two: scales of nvfp4 are numbers of e4m3"),
            (self.weight_tensorwise and in_blocks, f"weight_tensorwise: scales of {self.scaling} differ along the sum"),
            (
                self.stochastic and self.backward != "e2m1",
                f"stochastic: gradients in e2m1 are rounded so, and backward is {self.backward}",
            ),
            (not self.saturating and has_e2m1, "saturating: e2m1 has no inf and no NaN, and so can do nothing else"),
        ):
            if is_wrong:
                raise HmpxError(why)

    @classmethod
    def of(cls, said: str | Mapping[str, Any] | Format | None) -> Format:
        """Return the format that a name or keys mean; None is "tensorwise".

        Raises:
            HmpxError: another name, key or value, with the nearest legal one.
        """
        if isinstance(said, Format):
            return said
        if isinstance(said, Mapping):
            legal = [each.name for each in fields(cls)]
            for key in said:
                if key not in legal:
                    raise HmpxError(f"{key!r} is no key of a format{did_you_mean(str(key), legal)}; {', '.join(legal)}")
            return cls(**said)
        name = "tensorwise" if said is None else said
        if name not in FORMATS:
            hint = did_you_mean(str(name), FORMATS)
            raise HmpxError(f"{name!r} is no format{hint} (legal: {', '.join(FORMATS)}, or keys of one)")
        return FORMATS[name]

    @property
    def bits(self) -> str:
        """What it is called by its width: "FP8", or "FP4" if all its elements have four bits."""
        return "FP4" if self.forward == self.backward == "e2m1" else "FP8"

    @property
    def multiple(self) -> int:
        """The number that hardware wants the sizes of a product's operands to be multiples of."""
        return 32 if self.scaling == "mx" else 16

    @property
    def exact_scales(self) -> bool:
        """Whether an element times the scale of its block or row is exact in BF16: powers of two, e2m1 times e4m3."""
        return self.scaling in ("mx", "nvfp4") or self.power_of_two

    def keys(self) -> dict[str, Any]:
        """Return the keys that differ from the default, as `of` takes them."""
        own = {key: value for key, value in vars(self).items() if value != getattr(_USUAL, key)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}

    def __str__(self) -> str:
        dtypes = self.forward if self.forward == self.backward else f"{self.forward}/{self.backward}"
        return f"{self.scaling} {dtypes}"


def _check(key: str, value: Any, legal: tuple) -> None:
    if not any(type(value) is type(each) and value == each for each in legal):
        words = list(map(str, legal))
        raise HmpxError(f"{key} is {value!r}, none of {', '.join(words)}{did_you_mean(str(value), words)}")


_USUAL = Format()
FORMATS = {
    "tensorwise": _USUAL,
    "rowwise": Format("rowwise", backward="e4m3", power_of_two=True),
    "blockwise": Format("blockwise", backward="e4m3"),
    "mx": Format("mx", backward="e4m3"),
    "mx-floor": Format("mx", backward="e4m3", rceil=False),
    "mxfp4": Format("mx", "e2m1", "e2m1", rceil=False),
    "nvfp4": Format("nvfp4", "e2m1", "e2m1", squares=True, stochastic=True, hadamard=True),
}


# Casts

# The numbers below stand in functions, not in the module: torch.compile(dynamic=True) turns a module's numbers into
# symbols, which a subgraph does not take.


def largest_of(name: str) -> float:
    return 6.0 if name == "e2m1" else torch.finfo(DTYPES[name]).max


def spills_of(name: str) -> float:
    """Return the bound above which numbers round to no number of the format."""
    return {"e4m3": 464.0, "e5m2": 61439.996, "e2m1": 6.9999995}[name]


def in_parts(
    x: Tensor, name: str, form: Format, dim: int, scaling: str, weight: bool = False, site: str = ""
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes of `x`, and the one or two scales that decode them.

    Args:
        x: (..., M, K), floating.
        name: "e4m3", "e5m2" or "e2m1".
        dim: -1 or -2, which the product sums over.
        weight: whether blocks are square, where the format has such blocks.
        site: of what is rounded stochastically, what it is cast for.

    Returns:
        FP8 of the shape of `x`; FP32 of a shape that broadcasts to it; and where the tensor has a scale beside those of
        its blocks that one, else None.
    """
    wide = aten.to.dtype(x, torch.float32)
    dims, whole = _dims(form, scaling, weight, dim), None
    largest = aten.to.dtype(_largest(aten.abs(x), scaling, dims), torch.float32)
    if scaling == "nvfp4":
        scale, whole, factor = nvfp4_scales(largest, largest_of(name))
    else:
        factor, scale = factors(largest, name, form, scaling == "mx")
    if scaling in BLOCK_OF:
        scale, factor = (_spread(each, x, scaling, dims) for each in (scale, factor))
    # In place wherever memory is new: new memory costs a CPU more than the computation in it.
    scaled = aten.mul(x, factor) if wide is x else aten.mul_(wide, factor)
    return encoded(scaled, name, form.saturating, site), scale, whole


def factors(largest: Tensor, name: str, form: Format, mx: bool = False) -> tuple[Tensor, Tensor]:
    """Return the factors that encode, and the scales that decode, for the largest magnitudes; in FP32."""
    if mx:
        factor = aten.exp2(aten.neg(_exponent(largest, name, form.rceil)))
    else:
        # In FP64 so that compiled code comes to the same bits.
        least = aten.to.dtype(aten.clamp_min(largest, 2.0**-110), torch.float64)  # so that the scale is finite
        factor = aten.reciprocal(aten.div(least, largest_of(name)))
        factor = aten.to.dtype(factor, torch.float32)
        if form.power_of_two:
            factor = aten.exp2(aten.sub(aten.frexp(factor)[1], 1))
    factor = aten.where(aten.isfinite(largest), factor, torch.nan)
    return factor, aten.reciprocal(factor)


def decoded(codes: Tensor, name: str, saturating: bool) -> tuple[Tensor, float]:
    """Return codes in FP32, and a factor that these numbers want beside the scale; NaN only where the scale is.

    e4m3 with its bits moved to where FP16 has exponent and mantissa is an FP16 number of 1/256 of the value. To have
    torch cast e4m3 takes a CPU ten times as long.
    """
    if name == "e5m2" or not saturating:  # which makes NaN of numbers alone
        return aten.to.dtype(codes, torch.float32), 1.0
    bits = aten.to.dtype(codes.view(torch.int8), torch.int16)
    bits = aten.bitwise_and_(aten.bitwise_left_shift_(bits, 7), ~0x4000)  # the sign was copied to there
    return aten.to.dtype(bits.view(torch.float16), torch.float32), 256.0


def _exponent(largest: Tensor, name: str, rceil: bool) -> Tensor:
    """Return the exponents of mx scales: nothing saturates, or by the OCP rule the exponent of the largest."""
    fraction, exponent = aten.frexp(aten.div(largest, largest_of(name)) if rceil else largest)
    if rceil:
        exponent = aten.sub(exponent, aten.to.dtype(aten.eq(fraction, 0.5), torch.int32))
    else:
        exponent = aten.sub(exponent, {"e4m3": 9, "e5m2": 16, "e2m1": 3}[name])
    return aten.clamp(exponent, -127, 127)


def encoded(x: Tensor, name: str, saturating: bool, site: str = "") -> Tensor:
    """Return `x`, which is overwritten, in FP8."""
    most = largest_of(name)
    if not saturating:
        over = torch.nan if name == "e4m3" else torch.inf
        spilt = aten.copysign(torch.full_like(x, over), x)
        clamped = aten.clamp(x, -most, most)
        return aten.to.dtype(aten.where(aten.gt(aten.abs(x), spills_of(name)), spilt, clamped), DTYPES[name])
    held = aten.clamp_(x, -most, most)
    return aten.to.dtype(to_e2m1(held, site) if name == "e2m1" else held, DTYPES[name])


def of_scales(x: Tensor, form: Format, dim: int, scaling: str, weight: bool) -> Tensor:
    """Return the largest number among those that share a scale, of numbers from 0 on."""
    return _largest(x, scaling, _dims(form, scaling, weight, dim))


def _dims(form: Format, scaling: str, weight: bool, dim: int) -> tuple[int, ...]:
    """Return the dimensions along which a block extends."""
    square = weight and (scaling == "blockwise" or (form.squares and scaling in BLOCK_OF))
    return (-1, -2) if square else (dim,)


def _largest(magnitude: Tensor, scaling: str, dims: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude for each scale: of all, of rows, or of each block along each of `dims`."""
    if scaling not in BLOCK_OF:
        return aten.amax(magnitude) if scaling == "tensorwise" else aten.amax(magnitude, dims, True)
    for dim in dims:
        rows = magnitude.transpose(dim, -1)
        padded = aten.constant_pad_nd(rows, [0, -rows.shape[-1] % BLOCK_OF[scaling]])
        magnitude = aten.amax(padded.unflatten(-1, (-1, BLOCK_OF[scaling])), [-1]).transpose(dim, -1)
    return magnitude


def _spread(of_blocks: Tensor, x: Tensor, scaling: str, dims: tuple[int, ...]) -> Tensor:
    """Return the value of its block for each element of `x`."""
    for dim in dims:
        rows = of_blocks.transpose(dim, -1).unsqueeze(-1)
        repeated = rows.expand(*rows.shape[:-1], BLOCK_OF[scaling]).flatten(-2)
        of_blocks = repeated[..., : x.shape[dim]].transpose(dim, -1)
    return of_blocks


# Numbers of four bits: rounding to e2m1, the two scales of NVFP4, and what makes gradients bear both


def to_e2m1(x: Tensor, site: str = "") -> Tensor:
    """Return the numbers of e2m1 for FP32 numbers of at most 6: the nearest, of two the even one.

    site: of a gradient that is rounded stochastically, the name of what it is cast for.
    """
    power = aten.bitwise_and(x.view(torch.int32), 0x7F800000).view(torch.float32)  # of two, the next beneath
    step = aten.mul_(aten.clamp_(power, 1.0, 4.0), 0.5)  # between neighbours: 0.5, from 2 on 1, from 4 on 2
    if not site:
        return aten.mul_(aten.round_(aten.div(x, step)), step)
    part = aten.mul_(aten.add(torch.ops.hmpx.random_numbers(x, site), 0.5), 2.0**-16)
    up = aten.floor_(aten.add_(part, aten.div(aten.abs(x), step)))
    return aten.copysign_(aten.mul_(up, step), x)


def _random_numbers(like: Tensor, site: str) -> Tensor:
    """Return a number of 16 bits for each element, others in each call.

    That is an op of its own, since a compiled program would have the first call's step in every step.
    """
    name = f"{site}, {like.shape[-1]} columns"
    rounded = process_state.gradients_rounded
    step = rounded[name] = rounded.get(name, -1) + 1
    count = like.numel()
    return random_numbers(like.reshape(-1), [Span(0, count, 0, count, 0)], (0, step, name)).view(like.shape)


if not hasattr(torch.ops.hmpx, "random_numbers"):  # an earlier import of hmpx has made it
    _ops = torch.library.Library("hmpx", "FRAGMENT")
    _ops.define(
        "random_numbers(Tensor like, str site) -> Tensor",
        tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
    )
    _ops.impl("random_numbers", _random_numbers, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "hmpx::random_numbers", lambda like, site: like.new_empty(like.shape, dtype=torch.int32), lib=_ops
    )


def nvfp4_scales(largest: Tensor, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales of NVFP4 for the largest magnitude of each block, and for `most` as the format's largest.

    Returns:
        The scales of blocks, numbers of e4m3 in FP32; the one of the tensor; and the factors that encode.
    """
    of_all = aten.amax(largest)
    largest = aten.where(aten.isfinite(of_all), largest, torch.nan)  # who share a scale with an inf become NaN
    whole = _ratio(aten.clamp_min(aten.amax(largest), 2.0**-110), 448 * most)  # so that the factors are finite
    scale = aten.clamp(_ratio(_ratio(largest, most), whole), 2.0**-6, 448.0)
    scale = aten.to.dtype(aten.to.dtype(scale, torch.float8_e4m3fn), torch.float32)
    return scale, whole, _ratio(_ratio(aten.ones_like(whole), whole), scale)


def _ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """Return ``a / b`` in FP32, by way of FP64, so that compiled code comes to the same bits."""
    return aten.to.dtype(aten.div(aten.to.dtype(a, torch.float64), b), torch.float32)


def mixed(x: Tensor, dim: int) -> Tensor:
    """Return `x` in FP32 with each 16 along a dimension multiplied by a Hadamard matrix with random signs.

    The dimension is padded with zeros to a multiple of 16. Sums are taken in one order, the same everywhere.
    """
    rows = aten.to.dtype(x, torch.float32).transpose(dim, -1)
    blocks = aten.constant_pad_nd(rows, [0, -rows.shape[-1] % 16]).unflatten(-1, (-1, 16))
    # The low 16 bits of `derive_key(0, 0, "hadamard")`.
    signs = aten.bitwise_and(aten.bitwise_right_shift(0xCA9D, aten.arange(16, device=x.device)), 1)
    blocks = aten.mul(blocks, aten.sub(0.25, aten.mul(signs, 0.5)))  # 1/4 in all, as 16 numbers are added up
    for _ in range(4):
        even, odd = aten.unbind(blocks.unflatten(-1, (8, 2)), -1)
        blocks = aten.cat([aten.add(even, odd), aten.sub(even, odd)], -1)
    return blocks.flatten(-2).transpose(dim, -1)
