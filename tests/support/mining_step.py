"""The mining step on made-up rows, as tests call it."""

from pathlib import Path

import mining_by_hand as by_hand
import numpy as np

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import MiningConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records, write_part
from rayembed.data.mining.mine import make_mined
from rayembed.data.records import Record
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.teacher import TeacherLoader


def configured(**changes) -> MiningConfig:
    return parse(MiningConfig, {"teacher": "a", "num_negatives": 4, **changes})


def prepared(folder: Path, rows: list[Record], parts: int, name: str = "before") -> DatasetArtifact:
    """Rows as an earlier step left them, in so many parts."""
    made = [
        write_part(str(folder / name / "parts"), [rows[i] for i in places])
        for places in np.array_split(np.arange(len(rows)), parts)
    ]
    names = [[part.path.rsplit("/", 1)[-1], part.rows] for part in made]
    manifest = {"kind": "records", "fingerprint": f"{name} {parts}", "parts": names}
    return DatasetArtifact(str(folder / name), manifest)


def pipeline_context(folder: Path, seed: int = 0, **changes) -> PipelineContext:
    teacher_loader = TeacherLoader(by_hand.load, lambda reference: f"weights of {reference}")
    return PipelineContext(str(folder / "out"), seed, teacher_loader=teacher_loader, **changes)


def mine(
    folder: Path,
    rows,
    config: MiningConfig,
    parts: int = 1,
    held_out: HeldOut | None = None,
    cleaning: dict | None = None,
    **changes,
):
    """Mined records and the step's manifest."""
    dataset = dataset_of(config, cleaning)
    before = prepared(folder, rows, parts)
    done = make_mined(pipeline_context(folder, **changes), dataset, before, held_out or HeldOut())
    assert done.manifest["rows_in"] == done.manifest["rows_out"] == len(rows)
    return [r for part in done.parts for r in read_records(part.path)], done.manifest


def dataset_of(config: MiningConfig, cleaning: dict | None = None) -> DatasetConfig:
    source = {"kind": "pairs", "path": "none", "negatives": "negatives"}
    mining = config.model_dump(mode="json")
    values = {"name": "d", "source": source, "cleaning": cleaning or {}, "mining": mining}
    return parse(DatasetConfig, values)


def told(records) -> list:
    return [
        (
            [(n.text, n.rank, n.score, n.rule, n.teacher, n.cross_score) for n in r.negatives],
            (r.positive_score, r.positive_cross_score),
        )
        for r in records
    ]
