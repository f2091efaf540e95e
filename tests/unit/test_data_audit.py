"""The page beside a finished folder: everything of the manifest is on it, texts are escaped."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rayembed.data.audit import audit_page, write_folder_audit
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact
from rayembed.data.engine.parts import write_part
from rayembed.data.records import Negative, Record

MARKUP = "<script>alert('x')</script> & more"


def record(number: int) -> Record:
    return Record(
        id=f"r{number}",
        query=f"query number {number}",
        positives=(f"positive text of number {number}",),
        dataset="own",
        negatives=(Negative(MARKUP, rank=3, score=0.41, rule="top_k_perc_pos", teacher="abc"),),
        positive_score=0.75,
        language="de",
        origin=(f"pairs.jsonl@{number * 7}",),
    )


@pytest.fixture
def prepared(tmp_path: Path) -> DatasetArtifact:
    writer = ArtifactWriter(str(tmp_path), "mined", "own", {"settings": {"a": 1}})
    part = write_part(writer.parts_folder, [record(i) for i in range(50)])
    result = {"rows_in": 53, "rows_out": 50, "rejected": {"no query": 3}, "examples": []}
    return writer.finish(
        [result],
        [[part.path.rsplit("/", 1)[-1], 50]],
        histograms=[
            {"positive": [0] * 87 + [50] + [0] * 12, "negative": [0] * 70 + [9] * 30},
            {"positive": [1] * 100, "negative": [0] * 100},
        ],
        refused={"rule": 1234, "class": 2},
        mined=50,
        candidates=12340,
        short=5,
        mining_examples=[
            {
                "query": MARKUP,
                "positive": "found",
                "positive_score": 0.9,
                "negatives": [{"text": "near", "score": 0.5, "rank": 4, "cross_score": None}],
                "refused": [{"text": "too near", "score": 0.89}],
            }
        ],
        sizes={"edges": [1.0, 2.0], "counts": [3], "least": 1},
    )


def test_the_page_shows_counts_reasons_examples_and_inputs(prepared: DatasetArtifact) -> None:
    path = write_folder_audit(prepared)
    page = Path(path).read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for shown in (
        "rows in 53",
        "rejected 3 no query",
        "rows out 50",
        "rule 1,234 (10.0%)",
        "negatives mined 50",
    ):
        assert shown in text, shown
    assert "rows with fewer negatives than asked for 5 (10.0%)" in text
    assert "near [0.500, rank 4]" in text
    assert "refused: too near [0.890]" in text
    assert "edges" not in text
    assert "query number 0 " in text
    assert "query number 49 " in text
    assert "0.750" in text
    assert "top_k_perc_pos, 0.410, rank 3" in text
    assert "from pairs.jsonl@343" in text
    assert page.count('class="q"') == 21
    assert page.count("data:image/png;base64,iVBOR") == 2
    assert "Scores of teacher 2" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    before = Path(path).stat().st_mtime_ns
    assert write_folder_audit(prepared) == path
    assert Path(path).stat().st_mtime_ns == before


def test_a_folder_of_few_rows_and_no_scores_has_a_page(prepared: DatasetArtifact) -> None:
    manifest = {
        k: v
        for k, v in prepared.manifest.items()
        if k not in ("histograms", "refused", "mining_examples")
    }
    bare = replace(record(1), negatives=(), positive_score=None, origin=(), language=None)
    page = audit_page(manifest, [bare])
    assert page.count('class="q"') == 1
    assert "<img" not in page
    assert audit_page(manifest, []).count('class="q"') == 0
