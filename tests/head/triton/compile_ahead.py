"""Compile the row kernels for GPUs that are not here, and print the registers and spills that the compiler reports.

Run as a program, without TRITON_INTERPRET: one JSON object per line, at last those of blocks that are too wide and spill, to
show that a spill is seen.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zloss.head.triton import SOURCE_BLOCK, STATISTICS_BLOCK, block_shape
from zloss.head.triton_kernels import row_exp_kernel, row_source_kernel, row_statistics_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = ("fp32", "bf16", "fp16")
AMD_COUNTS = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
VOCAB = 50257
KERNELS = {row_statistics_kernel: STATISTICS_BLOCK, row_source_kernel: SOURCE_BLOCK, row_exp_kernel: SOURCE_BLOCK}
ROW = dict.fromkeys(("row_max_ptr", "along_p_ptr", "along_target_ptr", "along_uniform_ptr"), "*fp32")
SIZES = dict.fromkeys(("row_stride", "out_stride", "tokens", "vocab", "columns"), "i32")
NUMBERS = {"scale": "fp32", "cap": "fp32", "exp_scale": "fp32"}


def signature(kernel: triton.JITFunction, dtype: str, constants: dict[str, object]) -> dict[str, str]:
    known = {"logits_ptr": f"*{dtype}", "index_ptr": "*i64", **ROW, **SIZES, **NUMBERS}
    known["out_ptr"] = "*fp32" if kernel is row_statistics_kernel else f"*{dtype}"
    # The products' E comes from fp32 logits; its own dtype is the one that varies.
    known |= {"max_index_ptr": "*i32"}
    if kernel is row_exp_kernel:
        known["logits_ptr"] = "*fp32"
    return {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}


def usage(compiled: triton.compiler.CompiledKernel, target: GPUTarget) -> dict[str, int]:
    """Registers per thread and bytes or registers spilled, as the final machine code has them."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        count = {name: int(re.search(rf"\.{name}:\s+(\d+)", text).group(1)) for name in AMD_COUNTS}
        return {
            "registers": count["vgpr_count"],
            "spilled": count["vgpr_spill_count"] + count["sgpr_spill_count"] + count["private_segment_fixed_size"],
        }
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    count = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return {"registers": count["REG"], "spilled": count["STACK"] + count["LOCAL"]}


def compile_for(
    kernel: triton.JITFunction, target: GPUTarget, dtype: str, *, softcap: bool, aligned: bool, widest: int
) -> dict[str, object]:
    block, warps = block_shape(VOCAB, widest)
    constants = {"SOFTCAP": softcap, "BLOCK": block}
    constants |= {row_source_kernel: {"SLOPE": True}}.get(kernel, {})
    place = {name: (position,) for position, name in enumerate(kernel.arg_names)}
    # Triton compiles a separate version for what is divisible by 16: torch's own tensors, and rows of a rounded vocabulary.
    divisible = [name for name in kernel.arg_names if name.endswith(("_ptr", "_stride")) or name in SIZES]
    source = ASTSource(
        kernel,
        signature(kernel, dtype, constants),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in divisible} if aligned else None,
    )
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": True})
    return {"kernel": kernel.__name__, "dtype": dtype, "block": block, **usage(compiled, target)}


def usual() -> Iterator[tuple[str, dict[str, object]]]:
    """Every kernel as the ops launch it."""
    for name, kernel, dtype, softcap, aligned in itertools.product(
        TARGETS, KERNELS, DTYPES, (False, True), (True, False)
    ):
        if aligned or dtype == "bf16":
            widest = KERNELS[kernel]
            yield name, compile_for(kernel, TARGETS[name], dtype, softcap=softcap, aligned=aligned, widest=widest)


def too_wide() -> Iterator[tuple[str, dict[str, object]]]:
    """Blocks that do not fit the registers: the spills must show."""
    for name, widest in {"sm_80": 32768, "sm_90": 32768, "gfx942": 65536}.items():
        yield (
            name,
            compile_for(row_statistics_kernel, TARGETS[name], "fp32", softcap=False, aligned=True, widest=widest),
        )


if __name__ == "__main__":
    for wide, rows in ((False, usual()), (True, too_wide())):
        for target_name, found in rows:
            print(json.dumps({"target": target_name, "too wide": wide, **found}), flush=True)
