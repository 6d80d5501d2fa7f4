"""The kernels in Triton, compiled to the code of GPUs that need not be there; test_triton.py starts it.

It prints a line for each kernel and GPU, and in the last line all of them in JSON: registers, bytes that are spilled
from them and of shared memory, the widest load in bytes, and the instructions of NVIDIA's.

    TRITON_INTERPRET=0 python -m tests.support.triton_compiled
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hmpx.rounding import triton_kernels as kernels
from hmpx.rounding.native import BF16, FP32, KERNELS, MASTER, SPLIT8
from hmpx.rounding.state_codes import STATE_CODES

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
ABSENT, UNEVEN, EVEN, ALIGNED = 0, 0, 1, 2
CODED, FOUR = STATE_CODES["8bit"].kind, STATE_CODES["4bit"].kind
MOVES = {
    "round, even": (FP32, BF16, EVEN),
    "encode, uneven": (FP32, CODED, UNEVEN),
    **{f"encode {name}, aligned": (FP32, code.kind, ALIGNED) for name, code in STATE_CODES.items()},
    **{f"decode {name}, aligned": (code.kind, FP32, ALIGNED) for name, code in STATE_CODES.items()},
    "halves to FP32, aligned": (SPLIT8, FP32, ALIGNED),
}
STEPS = {
    "AdamW with BF16 state, aligned": ("adam", BF16, BF16, BF16, BF16, ABSENT, ALIGNED),
    "AdamW in 8 bits, aligned": ("adam", BF16, BF16, CODED, CODED, ABSENT, ALIGNED),
    "AdamW in 4 bits, aligned": ("adam", BF16, BF16, FOUR, FOUR, ABSENT, ALIGNED),
    "AdamW in halves and 8 bits, aligned": ("adam", SPLIT8, BF16, CODED, CODED, ABSENT, ALIGNED),
    "Lion in 8 bits, uneven, masters": ("lion", MASTER, FP32, CODED, ABSENT, ABSENT, UNEVEN),
    "RMSprop in halves, aligned": ("rmsprop", SPLIT8, BF16, FP32, BF16, CODED, ALIGNED),
}
_WIDTHS = {"dwordx4": 16, "dwordx2": 8, "dword": 4, "ushort": 2, "ubyte": 1}  # of AMD's loads


def compiled(target: GPUTarget, name: str, *constants: int) -> dict:
    """What a kernel is made of."""
    function = getattr(kernels, name)
    signature = {"table": "*i64", "rows": "*i32"} | ({"scalars": "*fp32"} if name == "step_list" else {})
    names = [each for each in function.arg_names if each not in signature]
    source = ASTSource(
        function,
        {each: signature.get(each, "constexpr") for each in function.arg_names},
        constexprs=dict(zip(names, constants, strict=True)),
        attrs={(function.arg_names.index(each),): [["tt.divisibility", 16]] for each in signature},
    )
    options = {"enable_fp_fusion": False, "num_warps": kernels.WARPS[constants[-1]]}
    done = triton.compile(source, target=target, options=options)
    told = in_amdgcn(done.asm["amdgcn"]) if target.backend == "hip" else in_ptx(done.asm["ptx"], done.asm["cubin"])
    return {**told, "shared": done.metadata.shared}


def in_ptx(code: str, binary: bytes) -> dict:
    instructions = set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]+\.[\w.:]+)\s", code, re.MULTILINE))
    loads = [re.match(r"ld\.global\.(?:v(\d)\.)?b(\d+)", each) for each in instructions]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "widest": max([int(load[1] or 1) * int(load[2]) // 8 for load in loads if load], default=0),
        "instructions": sorted(instructions),
    }


def in_amdgcn(code: str) -> dict:
    counts = {key: int(value) for key, value in re.findall(r"\.(\w+_count):\s+(\d+)", code)}
    return {
        "registers": counts["vgpr_count"],
        "spilled": 4 * (counts["vgpr_spill_count"] + counts["sgpr_spill_count"]),
        "widest": max(_WIDTHS[each] for each in re.findall(r"global_load_(\w+)", code) if each in _WIDTHS),
    }


def main() -> None:
    found = {}
    for gpu, target in TARGETS.items():
        for name, constants in (MOVES | STEPS).items():
            kernel = (
                ("step_list", KERNELS.index(constants[0]), *constants[1:])
                if name in STEPS
                else ("move_list", *constants)
            )
            told = found[f"{gpu}, {name}"] = compiled(target, *kernel)
            print(f"{gpu}, {name}:", *(f"{key} {value}" for key, value in told.items() if key != "instructions"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
