"""Read tables of the papers from data files next to the modules that use them."""

import csv
from importlib.resources import files


def rows_of(package: str | None, name: str) -> list[dict[str, str]]:
    """Read `NAME.csv` in a package's folder; each row is a dict by column name."""
    assert package is not None
    text = files(package).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
