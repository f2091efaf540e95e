"""The consistency filter against counting by hand, over shards, languages, parts; kills; reuse."""

import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import Part, read_records, write_part
from rayembed.data.engine.work_items import EXAMPLES_KEPT, Execute, in_process
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.data.words import normalised_hash
from rayembed.display.progress import hearing
from rayembed.errors import DataError, RayembedError
from rayembed.pipeline.checks.model import check_teachers
from rayembed.search import tiles
from rayembed.search.tiles import Tiles
from rayembed_extras.consistency import filter as consistency
from rayembed_extras.consistency.filter import (
    INCONSISTENT,
    count_above,
    histogram,
    make_filtered,
    own_ranks,
)
from rayembed_extras.consistency.shards import NOT_THERE, RowShard, Shards

embedded: list[int] = []


def fake_vectors(texts: Sequence[str]) -> np.ndarray:
    """Small whole numbers, alike for texts of one number: exact in float16, many equal scores."""
    made = []
    for text in texts:
        same, own = (np.random.default_rng(text_hash(t) + 2**63) for t in (text.split()[1], text))
        made.append(2 * same.integers(-2, 3, 4) + own.integers(-2, 3, 4))
    return np.array(made, dtype=np.float32).reshape(-1, 4)


def load(config: Any, weights: str, device: str):
    def encode(texts, role):
        embedded.append(len(texts))
        return fake_vectors(texts)

    return encode


def at(storage: object, execute: Execute = in_process, weights: str = "w", seed: int = 0):
    teacher_loader = TeacherLoader(
        load=load, fingerprint=lambda reference: f"{reference} {weights}"
    )
    return PipelineContext(str(storage), seed, execute, teacher_loader)


def made_up(count: int, languages: Sequence[str | None] = (None,), seed: int = 0) -> list[Record]:
    """Rows with one to three positives of few texts, the first often of the query's number."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        documents = rng.choice(count, 1 + i % 3, replace=False)
        records.append(
            Record(
                id=f"d/{i}",
                query=f"query {documents[0] if i % 4 else rng.integers(count)}",
                positives=tuple(f"document {d}" for d in documents),
                dataset="d",
                language=languages[i % len(languages)],
            )
        )
    return records


def prepared(storage: object, records: Sequence[Record], rows_per_part: int) -> DatasetArtifact:
    """The records as an earlier step leaves them, named by what they hold and not by their parts.

    Different parts in the same folder would only be found again.
    """
    writer = ArtifactWriter(
        str(storage), "records", "d", {"content": [dataclasses.astuple(r) for r in records]}
    )
    starts = range(0, len(records), rows_per_part)
    parts = [write_part(writer.parts_folder, records[i : i + rows_per_part]) for i in starts]
    named = [[part.path.rsplit("/", 1)[-1], part.rows] for part in parts]
    return writer.finish(
        [{"rows_in": len(records), "rows_out": len(records), "rejected": {}}], named
    )


def dataset(**changes: Any) -> DatasetConfig:
    consistency = {"teacher": "small", "top_k": 2, "shard_rows": 1000} | changes
    source = {"kind": "pairs", "path": "none.jsonl"}
    return parse(DatasetConfig, {"name": "d", "source": source, "consistency": consistency})


def shard_of(record: Record, rows: int, shard_rows: int, seed: int) -> int:
    """Number of the row's shard within its language, in plain integers."""
    mask = 2**64 - 1
    salt = xxhash.xxh3_64_intdigest(f"{seed}\0consistency".encode())
    value = (text_hash(record.id) & mask) ^ salt
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) % -(-rows // shard_rows)


def brute_force(
    records: Sequence[Record], top_k: int, shard_rows: int, seed: int = 0
) -> dict[str, tuple[str, ...]]:
    """Id → positives that stay, from the definition: one positive after the other."""
    groups: dict[tuple[str | None, int], list[Record]] = {}
    for record in records:
        rows = sum(other.language == record.language for other in records)
        shard = shard_of(record, rows, shard_rows, seed)
        groups.setdefault((record.language, shard), []).append(record)
    stays: dict[str, tuple[str, ...]] = {}
    for group in groups.values():
        documents = {text for record in group for text in record.positives}
        for record in group:
            rivals = sorted(documents - {record.query, *record.positives})
            query = fake_vectors([record.query])[0]
            scores = fake_vectors(rivals) @ query
            kept = tuple(
                text
                for text in record.positives
                if (scores > fake_vectors([text])[0] @ query).sum() < top_k
            )
            if kept:
                stays[record.id] = kept
    return stays


def ids(found: DatasetArtifact) -> list[str]:
    return [record.id for part in found.parts for record in read_records(part.path)]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 100),
    shards=st.sampled_from([1, 2, 3]),
    rows_per_part=st.sampled_from([13, 60]),
    top_k=st.sampled_from([1, 2, 5]),
    languages=st.sampled_from([(None,), (None, "de", "en")]),
)
def test_equals_brute_force(
    seed, shards, rows_per_part, top_k, languages, tmp_path_factory
) -> None:
    storage = tmp_path_factory.mktemp("filter")
    records = made_up(60, languages, seed)
    shard_rows = -(-60 // len(languages) // shards)
    config = dataset(top_k=top_k, shard_rows=shard_rows)
    found = make_filtered(at(storage, seed=seed), config, prepared(storage, records, rows_per_part))
    wanted = brute_force(records, top_k, shard_rows, seed)
    assert ids(found) == [record.id for record in records if record.id in wanted]
    given = {record.id: record for record in records}
    dropped = 0
    for part in found.parts:
        for record in read_records(part.path):
            gone = [t for t in given[record.id].positives if t not in wanted[record.id]]
            assert record.positives == wanted[record.id]
            assert record.false_negatives == tuple(map(normalised_hash, gone))
            dropped += len(gone)
    assert found.manifest.get("positives_dropped", 0) == dropped
    manifest = found.manifest
    assert manifest["shards"] == shards * len(languages)
    assert manifest["rows_in"] == 60 == manifest["rows_out"] + manifest["dropped"][INCONSISTENT]
    assert sum(manifest["ranks"].values()) == sum(len(record.positives) for record in records)
    assert len(wanted) < 60, "something goes"


def test_a_seed_that_divides_nothing_makes_no_other_folder(tmp_path: Path) -> None:
    records = made_up(60, (None, "de", "en"))
    parent = prepared(tmp_path, records, 25)
    most = 20  # rows of each language

    def folders(shard_rows: int) -> set[str]:
        config = dataset(shard_rows=shard_rows)
        return {make_filtered(at(tmp_path, seed=seed), config, parent).folder for seed in (0, 1, 2)}

    assert len(folders(60)) == 1
    assert len(folders(most)) == 1, "three languages of twenty rows"
    assert len(folders(most - 1)) == 3


def test_the_own_text_of_a_query_is_no_rival(tmp_path: Path) -> None:
    """Pairs in both directions: every query stands among the documents too."""
    there = [dataclasses.replace(r, positives=r.positives[:1]) for r in made_up(40)]
    back = [
        dataclasses.replace(r, id=f"{r.id} back", query=r.positives[0], positives=(r.query,))
        for r in there
    ]
    records = [r for pair in zip(there, back, strict=True) for r in pair]
    found = make_filtered(at(tmp_path), dataset(), prepared(tmp_path, records, 33))
    wanted = brute_force(records, 2, 1000)
    assert set(ids(found)) == wanted.keys()
    # Teeth: with itself as a rival a query would lose its document.
    stays = set()
    documents = sorted({record.positives[0] for record in records})
    for record in records:
        scores = fake_vectors(documents) @ fake_vectors([record.query])[0]
        own = scores[documents.index(record.positives[0])]
        if (scores > own).sum() < 2:
            stays.add(record.id)
    assert stays < wanted.keys()


def test_nothing_left_or_nothing_there_is_an_error(tmp_path: Path) -> None:
    numbers = {"query 0": 0, "query 1": 1, "document 0": 1, "document 1": 0}

    def crossed(config: Any, weights: str, device: str):
        return lambda texts, role: np.eye(4, dtype=np.float32)[[numbers[t] for t in texts]]

    pipeline_context = PipelineContext(
        str(tmp_path),
        0,
        in_process,
        TeacherLoader(crossed, lambda reference: "w"),
    )
    rows = [Record(f"{i}", f"query {i}", (f"document {i}",), "d") for i in range(2)]
    before = prepared(tmp_path, rows, 1)
    assert make_filtered(pipeline_context, dataset(top_k=2), before).manifest["rows_out"] == 2
    with pytest.raises(DataError, match=r"'d': .* leaves none of its 2 rows, .*'2': 2.*top_k=1"):
        make_filtered(pipeline_context, dataset(top_k=1), before)
    with pytest.raises(DataError, match="'d' has no rows"):
        make_filtered(pipeline_context, dataset(), prepared(tmp_path / "no", [], 25))


def test_a_teacher_that_cannot_be_loaded_is_refused_before_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RayembedError, match=r"^data\.datasets\.d\.consistency\.teacher cannot"):
        check_teachers([dataset(teacher=str(tmp_path))])


def test_shards_and_languages_are_kept_apart() -> None:
    records = made_up(60, ("de", "en"))
    together = [dataclasses.replace(record, language=None) for record in records]
    assert brute_force(records, 2, 1000) != brute_force(together, 2, 1000)
    assert brute_force(records, 2, 10) != brute_force(records, 2, 1000)
    # Teeth: more documents would keep other rows.
    assert 0 < len(brute_force(records, 2, 1000)) < len(brute_force(records, 5, 1000)) < 60


def test_manifest_tells_languages_ranks_and_examples(tmp_path: Path) -> None:
    records = made_up(90, ("de", "en", None))
    found = make_filtered(at(tmp_path), dataset(), prepared(tmp_path, records, 40))
    languages = found.manifest["languages"]
    assert [(entry["language"], entry["rows"]) for entry in languages] == [
        (None, 30),
        ("de", 30),
        ("en", 30),
    ]
    for entry in languages:
        kept = sum(record_id in ids(found) for record_id in _ids_of(records, entry["language"]))
        assert entry["kept"] == kept
        assert entry["share"] == pytest.approx(kept / 30, abs=1e-4)
    ranks = found.manifest["ranks"]
    kept = [record for part in found.parts for record in read_records(part.path)]
    assert ranks["1"] + ranks["2"] == sum(len(record.positives) for record in kept)
    assert found.manifest["positives_dropped"] > 0
    examples = found.manifest["examples"]
    assert len(examples) == EXAMPLES_KEPT
    by_id = {record.id: record for record in records}
    for example in examples:
        record = by_id[example["id"]]
        assert (example["query"], example["document"]) == (record.query, record.positives[0])
        assert example["rank"] > 2
        assert example["id"] not in ids(found)


def _ids_of(records: Sequence[Record], language: str | None) -> list[str]:
    return [record.id for record in records if record.language == language]


def test_what_is_there_is_not_done_again_and_other_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepared(tmp_path, made_up(60), 25)
    first = make_filtered(at(tmp_path), dataset(), before)
    done: list[Any] = []

    def counts(task, units, needs):
        for unit in units:
            done.append(unit)
            yield task(unit)

    embedded.clear()
    again = make_filtered(at(tmp_path, counts), dataset(), before)
    assert (again.folder, again.manifest, again.reused) == (first.folder, first.manifest, True)
    assert not done
    # Another depth searches again with the vectors that are there.
    other = make_filtered(at(tmp_path, counts), dataset(top_k=5), before)
    assert other.folder != first.folder
    assert done
    assert not embedded
    changed = make_filtered(at(tmp_path, counts, weights="v"), dataset(), before)
    assert changed.folder != first.folder
    assert embedded
    embedded.clear()
    for module in ("rayembed_extras.consistency.filter", "rayembed.data.vectors.teacher"):
        monkeypatch.setattr(f"{module}.VECTORS", "raised")
    anew = make_filtered(at(tmp_path, counts), dataset(), before)
    assert anew.folder not in (first.folder, changed.folder)
    assert embedded


def test_a_killed_filter_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    records = made_up(80, ("de", "en"))
    whole = make_filtered(
        at(tmp_path / "a"), dataset(shard_rows=20), prepared(tmp_path / "a", records, 30)
    )
    before = prepared(tmp_path / "b", records, 30)
    calls = 0
    for _ in range(60):
        left = 1

        def dies(task, units, needs):
            nonlocal left, calls
            for unit in units:
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                calls += 1
                yield task(unit)

        try:
            found = make_filtered(at(tmp_path / "b", dies), dataset(shard_rows=20), before)
        except KeyboardInterrupt:
            continue
        break
    # Three parts are embedded, counted, cut by shard and filtered; four shards are searched.
    assert calls == 16
    assert [part.path.rsplit("/", 1)[-1] for part in found.parts] == [
        part.path.rsplit("/", 1)[-1] for part in whole.parts
    ]
    assert not list(tmp_path.glob("b/data/filtered/*/working"))


def test_equal_scores_do_not_count_and_own_positives_neither() -> None:
    documents = np.array([[1.0, 0], [1, 0], [0.5, 0], [0, 1]], dtype=np.float16)
    shard = RowShard(
        part=np.zeros(3, np.int64),
        row=np.arange(3),
        text=np.array([0, 1, 2]),
        queries=np.array([[1, 0], [1, 0], [1, 0]], dtype=np.float16),
        first=np.array([0, 1, 2, 4]),
        place=np.array([1, 2, 3, 0]),
        documents=documents,
        itself=np.array([NOT_THERE, NOT_THERE, NOT_THERE]),
    )
    # Row 0: nothing above a tie. Row 1: two above. Row 2: three above its first, one of them its
    # own, which has nothing above it.
    assert own_ranks(shard).tolist() == [1, 3, 3, 1]
    # The first text is the query of rows 1 and 2; row 2 has it among its positives too.
    asked = dataclasses.replace(shard, itself=np.array([NOT_THERE, 0, 0]))
    assert own_ranks(asked).tolist() == [1, 2, 3, 1]


def test_count_above_equals_counting_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    queries = rng.integers(-3, 4, (50, 8)).astype(np.float16)
    documents = rng.integers(-3, 4, (70, 8)).astype(np.float16)
    limits = rng.integers(-20, 20, 50)
    scores = queries.astype(np.int64) @ documents.astype(np.int64).T
    wanted = (scores > limits[:, None]).sum(1)
    assert (wanted != (scores >= limits[:, None]).sum(1)).any(), "equal scores are told apart"
    assert count_above(queries, limits, documents).tolist() == wanted.tolist()
    monkeypatch.setattr(tiles, "CPU", Tiles(chunk=30, documents=11, scores=77, queries=7))
    assert count_above(queries, limits, documents).tolist() == wanted.tolist()
    assert count_above(queries, limits, documents[:0]).tolist() == [0] * 50
    assert count_above(queries[:0], limits[:0], documents).tolist() == []
    heard: list[float] = []
    with hearing(heard.append):
        count_above(queries, limits, documents)
    assert heard[-1] == 1


def test_scores_of_positives_go_with_them() -> None:
    given = Record("d/0", "q", ("a", "b", "c"), "d", positive_score=0.5, false_negatives=(7,))
    given = dataclasses.replace(given, positive_scores=(0.5, 0.25, 0.75))
    left = consistency._with(given, [False, True, True])
    assert (left.positives, left.positive_score) == (("b", "c"), 0.25)
    assert left.positive_scores == (0.25, 0.75)
    assert left.false_negatives == (7, normalised_hash("a"))
    last = consistency._with(given, [False, False, True])
    assert (last.positive_score, last.positive_scores) == (0.75, None)
    unknown = dataclasses.replace(given, positive_scores=None)
    assert consistency._with(unknown, [False, True, True]).positive_score is None
    assert consistency._with(given, [True] * 3) is given


def test_histogram_has_every_rank_once() -> None:
    counts = histogram(np.array([1, 1, 2, 3, 4, 5, 6, 10, 11, 20, 21, 50, 51, 100, 101, 101]))
    assert counts == {
        "1": 2, "2": 1, "3": 1, "4-5": 2, "6-10": 2, "11-20": 2, "21-50": 2, "51-100": 2, ">100": 2
    }  # fmt: skip


def test_shards_are_about_as_large_as_asked_and_those_of_one_language() -> None:
    shards = Shards.for_rows({"en": 5000, None: 10, "de": 1001}, 1000, seed=3)
    assert shards.of == {None: 1, "de": 2, "en": 5}
    assert shards.languages == [None, "de", "de", *["en"] * 5]
    hashes = np.random.default_rng(0).integers(-(2**63), 2**63, 5000)
    numbers = shards.numbers(hashes, ["en"] * 5000)
    sizes = np.bincount(numbers, minlength=8)
    assert sizes[:3].tolist() == [0, 0, 0]
    assert sizes[3:].min() > 900
    assert (shards.numbers(hashes[::-1], ["en"] * 5000)[::-1] == numbers).all()
    assert (Shards(shards.of, seed=4).numbers(hashes, ["en"] * 5000) != numbers).any()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=8), st.integers(0, 99))
def test_ranks_go_back_to_the_rows_of_their_parts(rows: list[int], seed: int) -> None:
    """Rows of a shard come from several parts, in any order."""
    rng = np.random.default_rng(seed)
    places = [(part, row) for part, count in enumerate(rows) for row in range(count)]
    shards = np.array_split(rng.permutation(len(places)), 3)
    rank_of = {(*place, turn): int(rng.integers(1, 9**5)) for place in places for turn in (0, 1)}
    top_k = int(np.median(list(rank_of.values())))

    def read(_: str, number: int) -> tuple[np.ndarray, ...]:
        some = [places[place] for place in shards[number]]
        found = [
            (part, row, 2 * row + turn, rank_of[part, row, turn])
            for part, row in some
            for turn in (0, 1)
        ]
        return tuple(np.array(found, np.int64).reshape(-1, 4).T)

    told = SimpleNamespace(languages=["en", "en", "fr"])
    parts = [Part(f"part-{number}.parquet", count) for number, count in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "read_ranks", read)
        twice = [2 * count for count in rows]
        ranked, shares, lost = consistency._ranked_parts("folder", parts, twice, told, top_k)
    assert [item.part for item in ranked] == parts
    for number, (item, count) in enumerate(zip(ranked, rows, strict=True)):
        own = [(rank_of[number, row, 0], rank_of[number, row, 1]) for row in range(count)]
        stays = np.unpackbits(item.stays, count=2 * count)
        assert stays.tolist() == [rank <= top_k for both in own for rank in both]
        assert item.shown == tuple(both[0] for both in own if min(both) > top_k)[:10]
    assert [share["rows"] for share in shares] == [
        len(shards[0]) + len(shards[1]),
        len(shards[2]),
    ]
    both = [
        (rank_of[part, row, 0] <= top_k, rank_of[part, row, 1] <= top_k) for part, row in places
    ]
    assert sum(share["kept"] for share in shares) == sum(map(any, both))
    assert lost == sum(one != other for one, other in both)


def test_units_of_the_filter_hold_a_bit_for_each_row() -> None:
    """The driver has the units of all parts at once, and what is pickled of them."""
    rows, parts = 80_000, [Part(f"part-{number}.parquet", 8000) for number in range(10)]
    place = np.random.default_rng(0).permutation(rows)
    read = (place // 8000, place % 8000, place % 8000, 1 + place % 300_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "read_ranks", lambda *_: read)
        told = SimpleNamespace(languages=[None])
        ranked, _, lost = consistency._ranked_parts("folder", parts, [8000] * 10, told, 20)
    assert lost == 0
    assert sum(len(pickle.dumps(item)) for item in ranked) < rows / 8 + 500 * len(parts)
