"""The kernels in Triton, compiled to the code of a GPU that need not be there; test_triton.py starts it.

It prints, in JSON, what each is made of: instructions, and the widest load.
"""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hmpx.rounding import triton_kernels as kernels
from hmpx.rounding.native import BF16, CODED, FP32, KERNELS, MASTER, SPLIT8

ABSENT, UNEVEN, EVEN, ALIGNED = 0, 0, 1, 2
MOVES = {
    "round, even": (FP32, BF16, 0, EVEN),
    "encode, uneven": (FP32, CODED, 0, UNEVEN),
    "decode, aligned": (CODED, FP32, 0, ALIGNED),
}
STEPS = {
    "AdamW in 8 bits, aligned": ("adam", BF16, BF16, CODED, CODED, ABSENT, 0, ALIGNED),
    "Lion in 8 bits, uneven, masters": ("lion", MASTER, FP32, CODED, ABSENT, ABSENT, 0, UNEVEN),
    "RMSprop in halves, aligned": ("rmsprop", SPLIT8, BF16, FP32, BF16, CODED, 32, ALIGNED),
}


def compiled(name: str, *constants: int) -> str:
    """The code of a kernel, in PTX; its code for a GPU is made of that, too."""
    function = getattr(kernels, name)
    signature = {"table": "*i64", "count": "i32"} | ({"scalars": "*fp32"} if name == "step_list" else {})
    names = [each for each in function.arg_names if each not in signature]
    source = ASTSource(
        function,
        {each: signature.get(each, "constexpr") for each in function.arg_names},
        constexprs=dict(zip(names, constants, strict=True)),
        attrs={(function.arg_names.index(each),): [["tt.divisibility", 16]] for each in signature if each != "count"},
    )
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert done.asm["cubin"]
    return done.asm["ptx"]


def made_of(code: str) -> tuple[list[str], str]:
    instructions = set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]+\.[\w.:]+)\s", code, re.MULTILINE))
    loads = {match[1] for each in instructions if (match := re.match(r"ld\.global\.(v\d)", each))}
    return sorted(instructions), max(loads, default="")


def main() -> None:
    found = {name: made_of(compiled("move_list", *constants)) for name, constants in MOVES.items()}
    for name, (kernel, *constants) in STEPS.items():
        found[name] = made_of(compiled("step_list", KERNELS.index(kernel), *constants))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
