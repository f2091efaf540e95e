"""Runs a command as on a CPU without AVX512, VNNI and AMX, with all processes that it starts.

`ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` hold torch alone, and only its kernels: onnxruntime,
NumPy and torch's own tests of the CPU see the units still. This hides them from every library
(`hide_units.c`). Speeds are then those of AVX2 on this CPU's clock, caches and memory. Needs Linux
on x86-64, a C compiler and a CPU that lets CPUID fault (`cpuid_fault` in /proc/cpuinfo).

    python -m benchmarks.avx2 python benchmarks/runtime_speed.py
    python -m benchmarks.avx2 make test
"""

import ctypes
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from rayembed.assets.cache import cache_folder

SOURCE = Path(__file__).with_name("hide_units.c")

OPTIONS = ("-O2", "-shared", "-fPIC", "-Wl,-z,initfirst")
"""Its constructor runs before those of libraries that a program is linked with."""


def library():
    """The library to preload, compiled once for each text of its source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("A C compiler is needed, cc or gcc (Debian: apt-get install gcc libc6-dev).")
    folder = cache_folder() / "avx2"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"hide_units-{sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if any(sign in str(made) for sign in " :"):
        sys.exit(f"{str(made)!r} cannot be preloaded for its space or colon; set RAYEMBED_CACHE.")
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *OPTIONS, "-o", str(part), str(SOURCE), "-ldl"], check=True)
        part.rename(made)
    ctypes.CDLL(str(made))  # where nothing may be loaded from, the linker would only warn
    return made


def environment():
    """This environment with the library in front of what is preloaded already."""
    information = Path("/proc/cpuinfo")
    flags = information.read_text() if information.exists() else ""
    if " cpuid_fault" not in flags:
        sys.exit(
            "This CPU does not let the instruction CPUID fault (/proc/cpuinfo has no cpuid_fault), "
            "so its units cannot be hidden. ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 holds "
            "torch's kernels to AVX2."
        )
    before = os.environ.get("LD_PRELOAD")
    return {**os.environ, "LD_PRELOAD": ":".join(filter(None, [str(library()), before]))}


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
