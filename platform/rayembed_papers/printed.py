"""Tables of the papers as data files, which lie beside the modules that read them."""

import csv
from importlib.resources import files


def rows_of(package: str | None, name: str) -> list[dict[str, str]]:
    """Rows of `NAME.csv` in the folder of a package, each cell by the name of its column."""
    assert package is not None
    text = files(package).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
