"""The format of an fp8 list, of eight bits or of four: one readable object, by name or by keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean

# What holds the codes of each kind of element. Every number of e2m1 is one of e4m3.
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float8_e4m3fn}
BLOCK = {"blockwise": 128, "mx": 32, "nvfp4": 16}  # elements that share a scale, along the dimension of the sum
SCALINGS = ("tensorwise", "rowwise", *BLOCK)
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
        elements = ("e2m1",) if self.scaling == "nvfp4" else tuple(CODES)
        legal: dict[str, tuple] = {"scaling": SCALINGS, "forward": elements, "backward": elements}
        for key in (each.name for each in fields(self) if each.type == "bool"):
            legal[key] = (True, False)
        for key, words in legal.items():
            _check(key, getattr(self, key), words)
        for product in self.products:
            _check("products", product, PRODUCTS)
        in_blocks, has_e2m1 = self.scaling in BLOCK, "e2m1" in (self.forward, self.backward)
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
