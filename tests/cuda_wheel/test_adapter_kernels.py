"""Triton's kernels of adapters' dropout: their values on the CPU, and code for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_compiler import compiled

from rayembed.models.adapters import adapter_bits, adapter_kernels

SUPPORT = Path(__file__).parents[1] / "support"
POINTERS = {"x", "weight", "of_thin", "out", "bits", "seed"}


def test_values_are_those_of_torchs_operations() -> None:
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "adapter_values.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=["sm_90", "sm_80"])
def test_kernels_build_and_none_spills(capability, dtype, rank, capsys) -> None:
    numbers = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    found = []
    for name, tile in adapter_kernels.tiles(numbers).items():
        kernel = getattr(adapter_kernels, name)
        types = {"tokens": "i32", "inputs": "i32", "rank": "i32", "scale": "fp32"}
        types |= dict.fromkeys(POINTERS & set(kernel.arg_names), f"*{dtype}")
        types["bits"] = "*u8"
        if name == "of_down_kernel":
            types["out"] = "*fp32"
        constants = {**tile, "RANK": rank}
        if "SPLIT" in kernel.arg_names:
            constants["SPLIT"] = adapter_bits.SPLIT
        found.append(compiled(kernel, types, constants, capability))
    types = {"seed": "*i64", "bits": "*u8", "size": "i32", "limit": "i32"}
    constants = {"BYTES": adapter_kernels.BYTES}
    found.append(compiled(adapter_kernels.draw_kernel, types, constants, capability))
    lines = [f"{k.registers:9} {k.spilled:7} {k.shared:6}  {k.name}" for k in found]
    heading = f"{found[0].architecture}, {dtype}, rank {rank}: registers spilled shared"
    with capsys.disabled():
        sys.stdout.write("\n".join(["", heading, *lines, ""]))
    assert [one.spilled for one in found] == [0] * 4
