"""A script of the checkout in a process of its own, which says what it loaded and left running."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    import multiprocessing
    heavy = {"ray", "deepspeed", "mlflow", "mteb"} & set(sys.modules)
    sys.stderr.write(f"loaded {sorted(heavy)} children {multiprocessing.active_children()}\\n")
"""


def run_script(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
