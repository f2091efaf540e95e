"""Draw the rooms of the core and their imports: `python docs/site/draw_rooms.py` writes rooms.svg.

Rows are the layers that import-linter holds, from the commands at the top; a line is an import from
a room to one below it, the thicker the more.
"""

import ast
import tomllib
from collections import Counter
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[2]
DRAWING = ROOT / "docs" / "rooms.svg"
_EVERYWHERE = ("machine", "display", "assets", "config", "errors")
"""Rooms that nearly all others import, each those to its right; their lines would hide others."""


def layers() -> list[list[str]]:
    """Rooms of the core by layer, the highest first, as import-linter's contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (core,) = [c for c in contracts["contracts"] if c.get("containers") == ["rayembed"]]
    rows = [[name.strip(" ()") for name in row.split("|")] for row in core["layers"]]
    hidden = {"__main__", *_EVERYWHERE}
    return [*(row for row in rows if not hidden.intersection(row)), list(_EVERYWHERE)]


def imports() -> Counter[tuple[str, str]]:
    """Number of imports from one room to another, those within functions too."""
    package = ROOT / "platform" / "rayembed"
    found: Counter[tuple[str, str]] = Counter()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayembed."):
                other = str(node.module).split(".")[1]
                if other != room:
                    found[room, other] += 1
    return found


def arrows() -> str:
    """The imports that are drawn, as text; the drawing has it as its description."""
    return ", ".join(f"{room} > {other}" for room, other in sorted(imports()))


def draw(path: Path = DRAWING) -> None:
    """Write the drawing as SVG."""
    rows = layers()
    mpl.rcParams["svg.hashsalt"] = "rooms"  # the same bytes each time
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(9, 0.62 * len(rows)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 9)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.axis("off")
    places = {}
    for level, row in enumerate(rows):
        for number, room in enumerate(row):
            places[room] = (9 * (number + 1) / (len(row) + 1), -level)
    for (room, other), number in sorted(imports().items()):
        if room in places and other in places and other not in _EVERYWHERE:
            (x, y), (to_x, to_y) = places[room], places[other]
            bend = 0.12 if (level_gap := y - to_y) > 1 else 0
            axes.annotate(
                "",
                (to_x, to_y + 0.2),
                (x, y - 0.2),
                arrowprops={
                    "arrowstyle": "-|>",
                    "linewidth": min(2.5, 0.4 + number / 12),
                    "color": "#7a8aa6",
                    "alpha": 0.75,
                    "connectionstyle": f"arc3,rad={bend if number % 2 else -bend}",
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
                zorder=1 / (1 + level_gap),
            )
    for room, (x, y) in places.items():
        color = "#e7e9ef" if room in _EVERYWHERE else "#cfe0ff"
        box = FancyBboxPatch(
            (x - 0.62, y - 0.17), 1.24, 0.34, boxstyle="round,pad=0.03", fc=color, ec="#3b4a6b"
        )
        box.set_zorder(2)
        axes.add_patch(box)
        axes.text(x, y, room, ha="center", va="center", fontsize=10, zorder=3, color="#1c2333")
    note = (
        "rayembed_extras and\nrayembed_papers import these rooms\nand are reached by tables alone"
    )
    axes.text(6.3, -0.25, note, ha="left", va="center", fontsize=9, color="#1c2333")
    figure.savefig(
        path, format="svg", metadata={"Date": None, "Description": arrows()}, facecolor="white"
    )


if __name__ == "__main__":
    draw()
