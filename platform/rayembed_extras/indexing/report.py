"""Tables and closing lines of index jobs."""

from typing import TYPE_CHECKING, TextIO

from rayembed.display.progress import duration
from rayembed.display.tables import console, facts_table
from rayembed_extras.indexing.places import place_of

if TYPE_CHECKING:
    from rayembed_extras.indexing.outcome import Indexed


def print_indexed(made: "Indexed", out: TextIO | None = None) -> None:
    """Print what a job did to an index, and one line that says where it is and what to do next."""
    counts, record = made.counts, made.record
    rejected = counts["rejected"]
    facts = {
        "model": f"{shown_reference(record.made_by.reference)}, {record.made_by.dimensions} "
        f"dimensions in {record.made_by.number_type}",
        "documents in": f"{counts['in']:,}",
        "new": f"{counts['new']:,}",
        "changed": f"{counts['changed']:,}",
        "unchanged": f"{counts['unchanged']:,}",
        "rejected": ", ".join(f"{number:,} × {why}" for why, number in rejected.items()) or "0",
        "deleted": f"{counts['deleted']:,}",
        "texts embedded": f"{counts['embedded']:,}, {counts['tokens']:,} tokens",
        "speed": f"{counts['texts_per_second']:,.0f} texts/s, "
        f"{counts['tokens_per_second']:,.0f} tokens/s, "
        f"{duration(counts['seconds_in_all'])} in all",
        "rows in the store": f"{record.rows:,}",
    }
    printer = console(out)
    printer.print(facts_table(f"Index {made.name}", facts))
    written = counts["new"] + counts["changed"]
    printer.print(
        f"index {made.name}: {record.rows:,} rows in {place_of(made.store)}, table {made.table}; "
        f"{written:,} documents written, {counts['deleted']:,} deleted. Next: search it "
        "(docs/indexing.md), and keep it current by the same command with --update",
        soft_wrap=True,
    )


def shown_reference(reference: str) -> str:
    """Reference of a model without its checksum."""
    return reference.partition("?")[0]
