"""The clustering step over parts, a batch plan of it, and the way back to the source."""

import collections
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dies_once import innermost

from rayembed.assets.array_files import save_array
from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ClusterConfig
from rayembed.config.run import Run
from rayembed.config.settings import changed, parse
from rayembed.data.clusters import tasks
from rayembed.data.clusters.cluster import make_clustered
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records, write_part
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.hashes import text_hash
from rayembed.data.plan.audit import folders_of, lineage
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.records import Record
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.data.words import normalised_hash
from rayembed.errors import ArtifactError, ConfigError, DataError

TOPICS = 6
ROWS = 203
embedded: list[int] = []


def vector_of(text: str) -> np.ndarray:
    """Near the centre of its topic, the text's last number; queries and documents alike."""
    topic = int(text.rsplit(" ", 1)[1])
    centre = np.random.default_rng(topic).standard_normal(8)
    own = np.random.default_rng(text_hash(text) % 2**32).standard_normal(8)
    made = centre + 0.5 * own
    return (made / np.linalg.norm(made)).astype(np.float32)


def load(config: Any, weights: str, device: str):
    def encode(texts, role):
        embedded.append(len(texts))
        return np.array([vector_of(text) for text in texts], dtype=np.float32)

    return encode


def at(storage: object, execute: Execute = in_process, weights: str = "w", seed: int = 0):
    return PipelineContext(
        str(storage),
        seed,
        execute,
        TeacherLoader(load, lambda reference: weights),
    )


def made_up(count: int = ROWS) -> list[Record]:
    rng = np.random.default_rng(5)
    topics = rng.integers(0, TOPICS, count).tolist()
    return [
        Record(
            id=str(i),
            query=f"query {i} of {t}",
            # Some documents are shared, some pairs have a further positive.
            positives=(f"Document {i // 2 if i % 9 == 0 else i} of {t}", f"more {i} of {t}")[
                : 1 + (i % 5 == 0)
            ],
            dataset="d",
            false_negatives=(7, 8) if i == 3 else (),
        )
        for i, t in enumerate(topics)
    ]


def before(storage: Path, rows: list[Record], size: int) -> DatasetArtifact:
    """A folder of records in parts; its name does not tell the size of the parts."""
    writer = ArtifactWriter(
        str(storage), "records", "d", {"rows": [r.id for r in sorted(rows, key=str)]}
    )
    parts = [write_part(writer.parts_folder, rows[i : i + size]) for i in range(0, len(rows), size)]
    result = {"rows_in": len(rows), "rows_out": len(rows), "rejected": {}}
    return writer.finish([result], [[p.path.rsplit("/", 1)[-1], p.rows] for p in parts])


def dataset(**changes: Any) -> DatasetConfig:
    values = {
        "teacher": "t",
        "dtype": "float32",
        "batch_pairs": 16,
        "restarts": 2,
        "iterations": 20,
    }
    return DatasetConfig(
        name="d",
        source=PairsSource(path="none"),
        clusters=ClusterConfig(**(values | changes)),
    )


def read(made: DatasetArtifact) -> list[list[Record]]:
    """The records of each batch."""
    rows = [record for part in made.parts for record in read_records(part.path)]
    size = made.manifest["batch_pairs"]
    assert len(rows) % size == 0
    assert all(part.rows % size == 0 for part in made.parts), "parts hold whole batches"
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayembed.data.engine.parts.ROWS_PER_PART", 50)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DatasetArtifact:
    storage = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.engine.parts.ROWS_PER_PART", 50)
        return make_clustered(at(storage), dataset(), before(storage, made_up(), 40))


def test_rows_are_in_whole_batches_and_none_is_lost(made: DatasetArtifact) -> None:
    batches = read(made)
    manifest = made.manifest
    assert len(batches) == manifest["batches"] == ROWS // 16
    assert manifest["rows_in"] == ROWS
    assert manifest["dropped"] == {"last batch is not full": ROWS % 16}
    assert manifest["rows_out"] == ROWS - ROWS % 16
    sources = {r.id: r for r in made_up()}
    seen = [r for batch in batches for r in batch]
    assert len({r.id for r in seen}) == len(seen)
    for r in seen:
        assert (r.query, r.positives) == (sources[r.id].query, sources[r.id].positives)
    assert not (Path(made.folder) / "scattered").exists()
    assert not (Path(made.folder) / "assigned").exists()


def test_batches_are_of_similar_pairs(made: DatasetArtifact) -> None:
    def purity(batches: list[list[Record]]) -> float:
        topics = [[r.query.rsplit(" ", 1)[1] for r in batch] for batch in batches]
        most = [collections.Counter(batch).most_common(1)[0][1] for batch in topics]
        return sum(most) / sum(map(len, batches))

    rows = made_up()
    assert purity(read(made)) > 0.75
    assert purity([rows[i : i + 16] for i in range(0, ROWS - 16, 16)]) < 0.5, "control"
    similar = made.manifest["similarity"]
    assert similar["mean"] > similar["random_mean"] + 0.3
    scores = [
        np.mean(
            [vector_of(a.query) @ vector_of(b.positives[0]) for b in batch for a in batch if a != b]
        )
        for batch in read(made)
    ]
    assert similar["mean"] == pytest.approx(np.mean(scores), abs=2e-3)  # float16
    assert sum(similar["counts"]) == made.manifest["batches"]
    everyone = [r for batch in read(made) for r in batch]
    queries = np.array([vector_of(r.query) for r in everyone])
    documents = np.array([vector_of(r.positives[0]) for r in everyone])
    scores = queries @ documents.T
    expected = scores[~np.eye(len(scores), dtype=bool)].mean()
    assert similar["random_mean"] == pytest.approx(expected, abs=0.05)


def test_false_negatives_are_those_of_the_definition(made: DatasetArtifact) -> None:
    masked = alone = 0
    for batch in read(made):
        for r in batch:
            own = {normalised_hash(text) for text in r.positives}
            query = vector_of(r.query).astype(np.float16).astype(np.float32)
            # Each positive of a row is trained in its turn, also with the lowest of the own ones.
            score = {
                text: float(query @ vector_of(text).astype(np.float16))
                for other in batch
                for text in other.positives
            }
            limit = min(score[text] for text in r.positives)
            wanted = {
                normalised_hash(text)
                for text, found in score.items()
                if found >= limit and normalised_hash(text) not in own
            }
            old = {7, 8} if r.id == "3" else set()
            assert set(r.false_negatives) == wanted | old
            count = sum(
                any(normalised_hash(t) in wanted for t in other.positives) for other in batch
            )
            masked += count
            alone += count == 15
    batches = made.manifest["batches"]
    assert made.manifest["masked_share"] == pytest.approx(masked / (batches * 16 * 15), abs=1e-6)
    assert made.manifest["rows_all_masked"] == alone
    assert masked > 100


def test_it_is_said_when_the_filter_leaves_most_rows_no_negative(tmp_path: Path, caplog) -> None:
    records = before(tmp_path, made_up(), 40)
    make_clustered(at(tmp_path), dataset(), records)
    assert "these rows give no training signal" not in caplog.text
    none_left = make_clustered(at(tmp_path), dataset(false_negative_margin=-2.0), records)
    assert none_left.manifest["rows_all_masked"] > 0.9 * none_left.manifest["rows_out"]
    assert "these rows give no training signal" in caplog.text


def test_margin_and_its_absence(made: DatasetArtifact, tmp_path: Path) -> None:
    records = before(tmp_path, made_up(), 40)
    none = make_clustered(at(tmp_path), dataset(false_negative_margin=None), records)
    assert {r.false_negatives for batch in read(none) for r in batch} <= {(), (7, 8)}
    some = make_clustered(at(tmp_path), dataset(false_negative_margin=0.1), records)
    for loose, strict in zip(read(some), read(made), strict=True):
        assert [r.id for r in loose] == [r.id for r in strict]
        pairs = zip(loose, strict, strict=True)
        assert all(set(a.false_negatives) <= set(b.false_negatives) for a, b in pairs)
    assert 0 < some.manifest["masked_share"] < made.manifest["masked_share"]
    assert none.manifest["masked_share"] == 0


@pytest.mark.parametrize("size", [203, 102, 68])
def test_the_number_and_order_of_parts_change_nothing(
    made: DatasetArtifact, size: int, tmp_path
) -> None:
    rows = made_up()
    other = make_clustered(at(tmp_path), dataset(), before(tmp_path, rows[::-1], size))
    assert other.fingerprint == made.fingerprint
    assert [p.digest for p in other.parts] == [p.digest for p in made.parts]
    same = {"seconds", "objective"}  # a sum over parts, rounded otherwise
    for key in set(made.manifest) - same:
        assert other.manifest[key] == made.manifest[key], key
    assert other.manifest["objective"] == pytest.approx(made.manifest["objective"], abs=2e-6)


def test_centroids_are_read_once_by_a_process_and_not_for_each_part(tmp_path: Path, monkeypatch):
    read = []
    mapped = tasks.map_array
    monkeypatch.setattr(
        tasks, "map_array", lambda path, remedy: read.append(path) or mapped(path, remedy)
    )
    rows = before(tmp_path, made_up(), 40)
    assert len(rows.parts) > 4
    make_clustered(at(tmp_path), dataset(), rows)
    assert len(read) == 1


def test_other_centroids_of_the_same_path_are_read_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "centroids-0.npy")
    for number in (1.0, 2.0):
        save_array(path, np.full((2, 4), number, np.float32))
        centroids, groups = tasks._clusters(path, str(number), False)
        assert centroids.tolist() == [[number] * 4] * 2
        assert groups is None


def test_seed_packing_and_teacher_change_the_outcome(
    made: DatasetArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = before(tmp_path, made_up(), 40)
    others = [
        make_clustered(at(tmp_path, seed=1), dataset(), records),
        make_clustered(at(tmp_path, weights="others"), dataset(), records),
        make_clustered(at(tmp_path), dataset(packing="random"), records),
        make_clustered(at(tmp_path), dataset(pairs_per_cluster=8), records),
    ]
    folders = {made.fingerprint, *(other.fingerprint for other in others)}
    assert len(folders) == 5
    for other in (others[0], others[2], others[3]):
        assert [p.digest for p in other.parts] != [p.digest for p in made.parts]
    assert others[3].manifest["clusters"] > made.manifest["clusters"]
    embedded.clear()
    again = make_clustered(at(tmp_path, weights="others"), dataset(), records)
    assert again == others[1]
    assert not embedded
    for module in ("clusters.cluster", "vectors.teacher"):
        monkeypatch.setattr(f"rayembed.data.{module}.VECTORS", "raised")
    anew = make_clustered(at(tmp_path), dataset(), records)
    assert anew.fingerprint not in folders
    assert embedded


def test_a_data_set_in_two_levels_keeps_its_rows_and_says_so(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    changes = {"pairs_per_cluster": 8, "batch_pairs": 8, "max_sample": 100}
    records = before(tmp_path, made_up(), 40)
    made = make_clustered(at(tmp_path), dataset(**changes, exact_clusters=25), records)
    assert "3.8 pairs for each of 26 clusters" in caplog.text
    assert made.manifest["groups"] == 6
    batches = read(made)
    assert len({r.id for batch in batches for r in batch}) == 8 * len(batches) == 200
    assert made.manifest["similarity"]["mean"] > made.manifest["similarity"]["random_mean"] + 0.1
    cut_otherwise = before(tmp_path / "other", made_up(), 203)
    other = make_clustered(
        at(tmp_path / "other"), dataset(**changes, exact_clusters=25), cut_otherwise
    )
    assert other.manifest["parts"] == made.manifest["parts"]


def test_each_pair_is_in_its_nearest_cluster(made: DatasetArtifact) -> None:
    centroids = np.load(Path(made.folder) / made.manifest["centroids"]).astype(np.float64)
    best = -np.ones(ROWS)
    chosen = np.zeros(ROWS, dtype=int)
    for i, r in enumerate(made_up()):
        pair = np.concatenate([vector_of(r.query), vector_of(r.positives[0])])
        pair = pair.astype(np.float16).astype(np.float64)
        pair /= np.linalg.norm(pair)
        for c, centroid in enumerate(centroids):
            if pair @ centroid > best[i]:
                best[i], chosen[i] = pair @ centroid, c
    sizes = np.bincount(chosen)
    told = made.manifest["sizes"]
    assert made.manifest["objective"] == pytest.approx(best.mean(), abs=2e-6)
    assert made.manifest["clusters"] == (sizes > 0).sum()
    assert "groups" not in made.manifest
    assert (told["smallest"], told["largest"]) == (sizes[sizes > 0].min(), sizes.max())
    # Every cluster that fills whole batches stands in such batches alone.
    by_id = {r.id: c for r, c in zip(made_up(), chosen.tolist(), strict=True)}
    alone = collections.Counter(
        by_id[batch[0].id] for batch in read(made) if len({by_id[r.id] for r in batch}) == 1
    )
    assert all(alone[c] >= size // 16 for c, size in enumerate(sizes.tolist()))
    assert max(made.manifest["objectives_of_restarts"]) >= 0.5
    assert len(made.manifest["objectives_of_restarts"]) == 2


def test_sizes_of_clusters_add_up(made: DatasetArtifact) -> None:
    sizes = made.manifest["sizes"]
    clusters = made.manifest["clusters"]
    assert sum(sizes["counts"]) == clusters
    assert clusters + made.manifest["empty_clusters"] == -(-ROWS // 16)
    assert sizes["mean"] * clusters == pytest.approx(ROWS, abs=0.1)
    assert sizes["smallest"] <= sizes["median"] <= sizes["largest"]
    assert 0.5 < made.manifest["objective"] <= 1.0
    examples = made.manifest["example_batches"]
    assert len(examples) == 3
    gathered = [json.loads(path.read_text()) for path in Path(made.folder).glob("units/gather*")]
    assert len(gathered) > 1
    assert sum(len(result["queries"]) for result in gathered) == 3, "blocks report what is shown"
    queries = {r.query for batch in read(made) for r in batch}
    assert all(len(batch) == 10 and set(batch) <= queries for batch in examples)
    assert (Path(made.folder) / "clusters.png").read_bytes()[:4] == b"\x89PNG"


def test_a_killed_clustering_goes_on_and_ends_the_same(
    made: DatasetArtifact, tmp_path: Path
) -> None:
    records = before(tmp_path, made_up(), 40)
    done: list[str] = []
    tries = 0
    while True:
        tries += 1
        left = 2

        def dies(task, units, needs):
            nonlocal left
            for unit in units:
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                name = type(innermost(task)).__name__
                done.append(f"{name} {unit.key}")
                yield task(unit)

        try:
            found = make_clustered(at(tmp_path, dies), dataset(), records)
        except KeyboardInterrupt:
            assert not list(tmp_path.glob("data/clustered/*/manifest.json"))
            continue
        break
    assert tries > 5
    assert len(done) == len(set(done)), "no unit is done twice, k-means least of all"
    assert sum(name.startswith("FindCentroids") for name in done) == 2
    assert [p.digest for p in found.parts] == [p.digest for p in made.parts]

    def refuses(task, units, needs):
        raise AssertionError("a second run does no work")

    assert make_clustered(at(tmp_path, refuses), dataset(), records) == found


def test_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'d' has 9 rows, fewer than one batch of .* 16"):
        make_clustered(at(tmp_path), dataset(), before(tmp_path, made_up(9), 5))


def make_run(folder: Path, **batch: Any) -> Run:
    clusters = {"teacher": "t", "batch_pairs": 16, "iterations": 20, "restarts": 1}
    mining = {"teacher": "t", "num_negatives": 3}
    return parse(
        Run,
        {
            "name": "test",
            "model": {
                "kind": "biencoder",
                "backbone": {"path": "none"},
                "pooling": {"kind": "mean"},
            },
            "data": {
                "root": str(folder),
                "datasets": [
                    {
                        "name": name,
                        "source": {"kind": "pairs", "path": f"{name}.jsonl"},
                        "clusters": clusters,
                        "mining": mining if name == "own" else None,
                    }
                    for name in ("own", "other")
                ],
            },
            "stages": [
                {
                    "name": "first",
                    "datasets": {"own": 1, "other": 1},
                    "batch": {
                        "policy": "clustered",
                        "global_pairs": 16,
                        "num_negatives": 2,
                        "in_batch_negatives": True,
                        **batch,
                    },
                    "optimizer": {"learning_rate": 1e-3},
                    "steps": 14,
                }
            ],
            "evaluation": {"benchmarks": []},
        },
    )


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, BatchPlan]:
    folder = tmp_path_factory.mktemp("chain")
    for name, rows in (("own", made_up()), ("other", made_up(100))):
        lines = [{"query": r.query, "positive": r.positives[0]} for r in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = make_run(folder)
    plans = prepare(run, at(folder / "out"))
    return run, folder, BatchPlan.open(plans["first"])


def test_each_step_is_one_clustered_batch(chain: tuple[Run, Path, BatchPlan]) -> None:
    _, _, plan = chain
    batches: dict[frozenset[str], int] = collections.Counter()
    given: set[frozenset[str]] = set()
    for name, folders in folders_of(plan).items():
        given |= {frozenset(f"{name} {r.id}" for r in batch) for batch in read(folders[0])}
    for step in range(plan.num_steps):
        rows = plan.read(step)
        assert len({r.dataset for r in rows}) == 1
        batches[frozenset(f"{r.dataset} {r.id}" for r in rows)] += 1
        assert all(len(r.negatives) <= 2 for r in rows)
    assert set(batches) <= given
    # Seven steps of each: 6 batches of the other, of which one comes twice, and 12 of its own.
    assert collections.Counter(batches.values()) == {1: 12, 2: 1}
    assert any(r.false_negatives for step in range(14) for r in plan.read(step))
    audit = (Path(plan.folder) / "audit.md").read_text()
    assert "Policy clustered: every batch is one of similar pairs of one data set" in audit
    assert "- steps: 7 of 14" in audit
    assert "of in-batch negatives masked" in audit


def test_lineage_leads_from_a_batch_to_the_source(chain: tuple[Run, Path, BatchPlan]) -> None:
    _, folder, plan = chain
    seen = set()
    for step in range(plan.num_steps):
        rows = lineage(plan, step)
        assert [record for record, _ in rows] == list(plan.read(step))
        for record, folders in rows:
            kinds = [found.manifest["kind"] for found in folders]
            seen.add((record.dataset, *kinds))
            if record.dataset == "own":
                assert all(n.teacher == "w" and n.rank is not None for n in record.negatives)
            # Up the chain each folder holds the record, and rows were counted from one to the next.
            for later, earlier in itertools.pairwise(folders):
                assert later.manifest["inputs"]["records"] == earlier.fingerprint
                assert later.manifest["rows_in"] == earlier.manifest["rows_out"]
    assert seen == {("own", "clustered", "mined", "records"), ("other", "clustered", "records")}
    every = (row for step in range(14) for row in lineage(plan, step))
    first, folders = next(row for row in every if row[0].dataset == "own")
    for found in folders:
        ids = {r.id for part in found.parts for r in read_records(part.path)}
        assert first.id in ids
    assert (folder / "own.jsonl").exists()


def test_lineage_says_which_folder_is_gone(chain: tuple[Run, Path, BatchPlan], tmp_path) -> None:
    _, folder, plan = chain
    mined = next((folder / "out" / "data" / "mined").iterdir())
    hidden = mined.rename(tmp_path / mined.name)
    try:
        with pytest.raises(ArtifactError, match=f"no folder of the records {mined.name}"):
            folders_of(plan)
    finally:
        hidden.rename(mined)
    bare = BatchPlan(plan.folder, {**plan.manifest, "inputs": {}})
    with pytest.raises(ArtifactError, match="does not record the folders of its data set 'other'"):
        folders_of(bare)


def test_clustered_records_serve_other_policies_too(chain, tmp_path: Path) -> None:
    _, folder, plan = chain
    run = make_run(folder)
    (stage,) = run.stages
    blended = changed(stage, name="mixed", batch=changed(stage.batch, policy="blended"))
    plans = prepare(changed(run, stages=(stage, blended)), at(folder / "out"))
    mixed = BatchPlan.open(plans["mixed"])
    assert BatchPlan.open(plans["first"]).fingerprint == plan.fingerprint
    assert all({r.dataset for r in mixed.read(step)} == {"own", "other"} for step in range(14))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": None}, r"'own' has no clusters; set data.datasets.own.clusters"),
        (
            {"clusters": {"teacher": "t", "batch_pairs": 8}},
            r"data.datasets.own.clusters.batch_pairs 8 must equal batch.global_pairs 16",
        ),
        ({"in_batch_negatives": False}, r"own.in_batch_negatives=false does not use them"),
    ],
)
def test_a_clustered_stage_needs_clusters_of_its_batches(changes, message, tmp_path: Path) -> None:
    values = make_run(tmp_path).model_dump(mode="json")
    values["data"]["datasets"][0] |= changes
    with pytest.raises(ConfigError, match=message):
        parse(Run, values)
    # The control: another policy asks nothing of them.
    values["stages"][0]["batch"]["policy"] = "blended"
    for dataset in values["data"]["datasets"]:
        dataset["clusters"] = None
    parse(Run, values)
