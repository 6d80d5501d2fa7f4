"""The kernels that cast to FP8, compiled to the code of GPUs that need not be there; test_fp8_gpu.py starts it.

It prints what `triton_compiled` prints of the other kernels: a line for each kernel and GPU, and all of them in JSON.

    TRITON_INTERPRET=0 python -m tests.support.fp8_compiled
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hmpx.ops.computing import fp8_triton as kernels
from hmpx.ops.computing.fp8_gpu import _WARPS
from tests.support.triton_compiled import in_ptx

SCALINGS = ("whole", "lines", "blocks", "squares")
WAYS = {"both": (True, True), "last": (True, False), "first": (False, True)}
CASTS = {
    f"encode {scaling} {way} {name}": ("encode", number, most, scaling == "lines", *directions)
    for number, scaling in enumerate(SCALINGS)
    for way, directions in WAYS.items()
    for name, most in (("e4m3", 448.0), ("e5m2", 57344.0))
    if name == "e4m3" or way == "both"
}
LARGEST = {"largest of a matrix": ("largest_of_matrix",), "largest of lines": ("largest_of_lines", True, True)}


def compiled(arch: int, name: str, *constants: object) -> dict:
    function = getattr(kernels, name)
    names = function.arg_names[len(function.arg_names) - len(constants) :]
    codes = "*fp8e5" if 57344.0 in constants else "*fp8e4nv"
    kinds = {"x": "*bf16", "found": "*i32", "last": codes, "first": codes} | dict.fromkeys(
        ("scale_last", "scale_first"), "*fp32")  # fmt: skip
    source = ASTSource(
        function,
        {each: "constexpr" if each in names else kinds.get(each, "i32") for each in function.arg_names},
        constexprs=dict(zip(names, constants, strict=True)),
        attrs={(i,): [["tt.divisibility", 16]] for i, each in enumerate(function.arg_names)
               if each not in (*names, "M", "programs")},
    )  # fmt: skip
    options = {"enable_fp_fusion": False, "num_warps": _WARPS}
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return in_ptx(done.asm["ptx"], done.asm["cubin"]) | {"shared": done.metadata.shared}


def main() -> None:
    found = {}
    for arch in (90, 100):
        for name, constants in (LARGEST | CASTS).items():
            told = found[f"sm_{arch}, {name}"] = compiled(arch, *constants)
            print(f"sm_{arch}, {name}:", *(f"{key} {value}" for key, value in told.items() if key != "instructions"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
