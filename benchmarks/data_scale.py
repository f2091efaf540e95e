"""How records, indexes and plans grow with the rows: `counted` tells what is counted.

Records are made from JSONL by the ordinary conversion; indexes and the order of a plan also of rows
that have nothing else, made up directly. With `--rows-per-part 256` as many parts as millions of
rows have, of few rows; with `--repeated 0.1` a tenth of the made-up rows have one query. Run:
python benchmarks/data_scale.py --rows 10000 100000
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from counted import as_json, exponents, machine, measured, table

BATCH = 512
NODES, CORES, GIGABITS = 16, 64, 25
"""Machines that the extrapolation assumes; GB/s of storage are those of their network."""

REQUESTS_PER_SECOND = 5500
"""Reads a second of one prefix, as S3 promises them; several prefixes have as many each."""


def small_parts(rows_per_part):
    """Let parts and plan files of this process have so many rows."""
    import rayembed.data.plan.write
    import rayembed.data.sources.convert  # noqa: F401  tasks below take the number from here

    for module in list(sys.modules.values()):
        if module.__name__.startswith("rayembed"):
            for name in ("ROWS_PER_PART", "ROWS_PER_FILE"):
                if hasattr(module, name):
                    setattr(module, name, rows_per_part)


def write_source(folder, rows):
    """JSONL of pairs of some 20 and 60 words; every 20th row is a near-duplicate."""
    words = np.array([f"word{i}" for i in range(5000)])
    rng = np.random.default_rng(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for first in range(0, rows, 1000):
            count = min(1000, rows - first)
            drawn = words[rng.integers(0, len(words), (count, 80))]
            drawn[::20, :70] = drawn[1 if count > 1 else 0, :70]
            for row in drawn.tolist():
                file.write(
                    json.dumps({"query": " ".join(row[:20]), "positive": " ".join(row[20:])})
                )
                file.write("\n")


def make_records_of(folder, near_duplicates, execute):
    """Records of the source; their folder."""
    from rayembed.config.data import DatasetConfig
    from rayembed.config.settings import parse
    from rayembed.data.engine.artifacts import PipelineContext
    from rayembed.data.sources.check import check_source
    from rayembed.data.sources.convert import make_records
    from rayembed.data.sources.tasks import HeldOut

    values = {"name": "d", "source": {"kind": "pairs", "path": "pairs.jsonl"}}
    if near_duplicates:
        values["cleaning"] = {"near_duplicates": {}}
    dataset = parse(DatasetConfig, values)
    context = PipelineContext(str(folder / "storage"), 0, execute, root=str(folder))
    return make_records(context, check_source(dataset, str(folder)), HeldOut()).folder


def read_indexes(records, execute):
    """All rows' ids, as a step reads them."""
    from rayembed.data.engine.index import read_column

    return len(read_column(records_of(records), "id_hash"))


def records_of(records):
    """Parts of a folder of records, or those given."""
    from rayembed.data.engine.artifacts import open_artifact

    return open_artifact(records).parts if isinstance(records, str) else records


def plan_config(rows):
    """A plan of one pass over the rows."""
    from rayembed.data.plan.order import PlanConfig

    return PlanConfig({"d": 1.0}, BATCH, 0, rows // BATCH, 0, in_batch_negatives=True)


def make_plan(folder, records, execute):
    """The plan's number of steps."""
    from rayembed.data.plan.write import write_plan

    parts = records_of(records)
    config = plan_config(sum(part.rows for part in parts))
    return write_plan(
        str(folder / "plans" / "plan"), {"d": parts}, config, execute=execute
    ).num_steps


def order_rows(folder, parts, execute):
    """What the driver does of a plan: usable rows, their order, and their places by part."""
    from rayembed.data.plan.order import draw_rows, usable_rows
    from rayembed.data.plan.scratch import PlaceWriter, scratch_folder

    config = plan_config(sum(part.rows for part in parts))
    with scratch_folder("the order", 0) as scratch:
        usable = usable_rows({"d": parts}, config, {}, scratch)
        places = PlaceWriter(scratch, str(folder / "places"), parts)
        draw_rows(usable, config, places.add)
        return len(places.finish())


def make_indexes(folder, rows, execute, repeated=0.0):
    """Parts that have an index and no rows; a share of the rows has one query."""
    from rayembed.assets.array_files import save_arrays
    from rayembed.data.engine.parts import ROWS_PER_PART, Part, index_path

    rng = np.random.default_rng(0)
    parts = []
    for first in range(0, rows, ROWS_PER_PART):
        count = min(ROWS_PER_PART, rows - first)
        part = Part(str(folder / f"part-{first:012d}.parquet"), count)
        id_hash, query_hash = rng.integers(-(2**62), 2**62, (2, count))
        query_hash[: round(repeated * count)] = 0
        save_arrays(
            index_path(part.path),
            id_hash=id_hash,
            query_hash=query_hash,
            num_negatives=np.full(count, 7, np.int32),
            in_batch=np.ones(count, bool),
            language_hash=np.zeros(count, np.int64),
        )
        parts.append(part)
    return parts


def count_steps(costs, rows, run, near_duplicates):
    """Add the costs of all steps of one size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_source(folder, rows)
        if near_duplicates:
            costs["records, near-duplicates"][rows] = run(make_records_of, folder, True)[1]
        records, costs["records"][rows] = run(make_records_of, folder, False)
        costs["indexes, first time"][rows] = run(read_indexes, records)[1]
        costs["indexes, again"][rows] = run(read_indexes, records)[1]
        costs["plan"][rows] = run(make_plan, folder, records)[1]


def count_order(costs, rows, run, repeated):
    """Add the costs of what the driver does, of made-up indexes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "parts").mkdir()
        parts, _ = run(partial(make_indexes, repeated=repeated), folder / "parts", rows)
        costs["made-up indexes, first time"][rows] = run(read_indexes, parts)[1]
        costs["order of made-up rows"][rows] = run(order_rows, folder, parts)[1]


def extrapolated(costs, rows_per_part, rows=1_000_000_000):
    """Lines about a plan of a billion rows on the machines assumed, by what was counted."""
    from rayembed.data.engine.parts import ROWS_PER_PART
    from rayembed.data.engine.parts import rows_per_part as rows_per_part_of
    from rayembed.data.engine.shuffle import Route

    measured_at, plan = list(costs["plan"].items())[-1]
    scale = rows / measured_at
    longer = rows_per_part_of(rows) // ROWS_PER_PART
    parts = -(-rows // (longer * rows_per_part))
    route, before = Route.to(parts), Route.to(-(-measured_at // rows_per_part))
    # Each level is read once; records, places and plan files are there beside them.
    written = plan.written * scale * (route.levels + 1) / (before.levels + 1)
    files = parts * (route.levels + 1)
    files_before = before.buckets * (before.levels + 1)
    ranges = parts * route.fan * route.levels
    bytes_per_second = NODES * GIGABITS / 8 * 1e9
    order_at, order = list(costs["order of made-up rows"].items())[-1]
    cpu = (plan.cpu_seconds - order.cpu_seconds * measured_at / order_at) * scale
    lines = [
        f"Assumed: {NODES} nodes of {CORES} cores and {GIGABITS} Gb/s, parts of "
        f"{longer * rows_per_part:,} rows, {longer} times those here, rows as long as here, CPU "
        "seconds and bytes in proportion to the rows, another write of "
        f"all rows for each level of the shuffle; {REQUESTS_PER_SECOND:,} reads a second of one "
        "prefix of object storage, and 3 requests a range.",
        f"- {parts:,} parts, {route.levels} levels of {route.fan} segments a file: "
        f"{files:,} files of rows, {files * plan.files / files_before:,.0f} with all others as at "
        f"{measured_at:,} rows ({plan.files:,} counted, {files_before:,} of them of rows: units' "
        f"results are beside them); {ranges:,} ranges "
        f"(a range for each part and plan file would be {parts**2:,}).",
        f"- Ranges: {3 * ranges / REQUESTS_PER_SECOND / 3600:.1f} h from one prefix, "
        f"{3 * ranges / REQUESTS_PER_SECOND / 3600 / NODES:.2f} h from {NODES}.",
        f"- Written: {written / 1e12:.2f} TB, {written / bytes_per_second / 60:.1f} min over the "
        "network, and about as much read.",
        f"- Tasks: {cpu / 3600:,.0f} CPU hours, {cpu / 3600 / NODES / CORES * 60:.0f} min.",
        f"- Driver: order in {order.cpu_seconds * rows / order_at / 3600:.1f} h of one core, "
        f"{(4 * rows + order.driver_own) / 1e9:.1f} GB of its own (4 bytes a row for an epoch's "
        f"permutation beside what {order_at:,} rows took), {60 * rows / 1e9:.0f} GB of scratch on "
        "disk at most.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--order-rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--rows-per-part", type=int, default=8192)
    parser.add_argument("--repeated", type=float, default=0.0, help="share of one query's rows")
    parser.add_argument("--near-duplicates", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the counts")
    args = parser.parse_args()
    setup = partial(small_parts, args.rows_per_part)
    run = partial(measured, setup=setup)
    steps = ["records, near-duplicates"] if args.near_duplicates else []
    steps += ["records", "indexes, first time", "indexes, again", "plan"]
    costs = {step: {} for step in steps}
    for rows in args.rows:
        count_steps(costs, rows, run, args.near_duplicates)
    costs |= {"made-up indexes, first time": {}, "order of made-up rows": {}}
    for rows in args.order_rows:
        count_order(costs, rows, run, args.repeated)
    print(machine())
    print(table(costs), exponents(costs), sep="\n\n")
    for rows, cost in costs["order of made-up rows"].items():
        own, mapped = cost.driver_own / rows, cost.driver_peak / rows
        print(f"\nOrder of {rows:,} rows: {own:.1f} bytes a row, {mapped:.1f} with mapped files")
    if costs["plan"] and costs["order of made-up rows"]:
        print(extrapolated(costs, args.rows_per_part))
    if args.json:
        args.json.write_text(json.dumps(as_json(costs), indent=1))


if __name__ == "__main__":
    main()
