"""What `--list` of the sweep job prints."""

from typing import TextIO

from rich.console import Console
from rich.table import Table

from rayembed.recipes.tables import get_table, table_names
from rayembed.tuning.trials import known_trials


def print_tables(*, out: TextIO) -> None:
    """Write a line for each table of a paper."""
    table = Table(
        "sweep", "what it compares", "source", "trials", title="Tables", title_justify="left"
    )
    for name in table_names():
        found = get_table(name)
        table.add_row(name, found.about, found.source, str(len(known_trials(found.sweep))))
    width = None if out.isatty() else 140
    Console(file=out, width=width, highlight=False, markup=False).print(table)
