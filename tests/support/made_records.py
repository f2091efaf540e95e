"""Records of a source, through the same path as a job takes them."""

from pathlib import Path
from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.records import Record
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut


def made_records(
    storage: Path | str,
    source: dict[str, Any],
    *,
    root: Path | str = "",
    held_out: HeldOut | None = None,
    seed: int = 0,
    **dataset: Any,
) -> tuple[list[Record], DatasetArtifact]:
    """The records in their order, and the folder."""
    config = parse(DatasetConfig, {"name": "own", "source": source, **dataset})
    checked = check_source(config, str(root))
    prepared = make_records(PipelineContext(str(storage), seed), checked, held_out or HeldOut())
    return [r for part in prepared.parts for r in read_records(part.path)], prepared
