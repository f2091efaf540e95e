"""How hard batches are: against loops, and rising as clusters shrink on data made of topics."""

import numpy as np
import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.clusters.cluster import make_clustered
from rayembed.data.engine.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.engine.parts import write_part
from rayembed.data.engine.work_items import in_process
from rayembed.data.records import Record
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed_papers.context import difficulty as measured
from rayembed_papers.context.difficulty import Difficulty, difficulty, measure_batches

TOPICS, ROWS_OF_TOPIC = 12, 8


def by_hand(queries, documents, margin):
    """Mean over all others, mean over those that stay, share of those that do not."""
    others, kept = [], []
    for i, query in enumerate(queries):
        own = float(query @ documents[i])
        for j, document in enumerate(documents):
            if j == i:
                continue
            score = float(query @ document)
            others.append(score)
            if margin is None or score < own + margin:
                kept.append(score)
    mean = sum(others) / len(others)
    return mean, sum(kept) / max(1, len(kept)), 1 - len(kept) / len(others)


@pytest.mark.parametrize("margin", [None, 0.0, -3.0, 99.0])
@pytest.mark.parametrize("tile", [3, 1024])
def test_it_equals_loops_over_all_pairs(margin, tile, monkeypatch):
    monkeypatch.setattr(measured, "_TILE_QUERIES", tile)
    rng = np.random.default_rng(0)
    # Whole numbers have exact products, so that limits are met exactly, too.
    queries, documents = (rng.integers(-2, 3, (20, 5)).astype(np.float16) for _ in range(2))
    batches = np.array([[0, 1, 2, 3, 4, 5, 6], [19, 7, 3, 12, 11, 9, 8]])
    found = difficulty(queries, documents, batches, margin)
    for number, batch in enumerate(batches):
        expected = by_hand(queries[batch].astype(float), documents[batch].astype(float), margin)
        values = found.means[number], found.left[number], found.masked[number]
        np.testing.assert_allclose(values, expected, atol=1e-5)
    assert found.mean == pytest.approx(np.mean(found.means))
    assert found.deviation == pytest.approx(np.std(found.means))
    assert found.mean_left == pytest.approx(np.mean(found.left))
    if margin == 0.0:
        assert 0 < found.masked_share < 1, "some meet the limit and some do not"


def test_several_data_sets_count_batch_by_batch():
    one = Difficulty((0.1, 0.2), (0.1, 0.1), (0.0, 0.0))
    both = one.with_more(Difficulty((0.6,), (0.4,), (0.3,)))
    assert (both.mean, both.mean_left, both.masked_share) == pytest.approx((0.3, 0.2, 0.1))
    assert Difficulty.of({name: list(values) for name, values in vars(both).items()}) == both


def load(config, weights, device):
    """Texts of one topic lie near the topic's own axis, those of neighbours a little nearer."""

    def encode(texts, role):
        rows = []
        for text in texts:
            number = int(text.split()[-1])
            rng = np.random.default_rng(number + (1000 if role == "query" else 0))
            row = 0.2 * rng.standard_normal(2 * TOPICS)
            row[number % TOPICS] += 2.0
            row[TOPICS + number % TOPICS // 3] += 1.0
            rows.append(row / np.linalg.norm(row))
        return np.array(rows, dtype=np.float32)

    return encode


@pytest.fixture
def prepared(tmp_path):
    count = TOPICS * ROWS_OF_TOPIC
    rows = [Record(str(i), f"query {i}", (f"document {i}",), "d") for i in range(count)]
    writer = ArtifactWriter(str(tmp_path), "records", "d", {"rows": count})
    parts = [write_part(writer.parts_folder, rows[i : i + 40]) for i in range(0, count, 40)]
    result = {"rows_in": count, "rows_out": count, "rejected": {}}
    return writer.finish([result], [[p.path.rsplit("/", 1)[-1], p.rows] for p in parts])


def dataset_of(**clusters):
    settings = {"teacher": "t", "batch_pairs": ROWS_OF_TOPIC, "restarts": 8, **clusters}
    source = {"kind": "pairs", "path": "none"}
    return parse(DatasetConfig, {"name": "d", "source": source, "clusters": settings})


def measure(tmp_path, prepared, sizes, *, execute=in_process, batches=(4, 8), **options):
    pipeline_context = PipelineContext(
        str(tmp_path),
        1,
        execute,
        TeacherLoader(load, lambda reference: "weights"),
    )
    return measure_batches(
        pipeline_context,
        dataset_of(),
        prepared,
        cluster_sizes=sizes,
        batch_sizes=batches,
        max_pairs=options.pop("max_pairs", 10_000),
        max_batches=options.pop("max_batches", 1000),
    )


def test_the_smaller_the_clusters_the_harder_the_batches(tmp_path, prepared):
    found = measure(tmp_path, prepared, [8, 24, 48])
    assert list(found) == [8, 24, 48, None]
    for pairs in (4, 8):
        count = TOPICS * ROWS_OF_TOPIC // pairs
        assert {len(by_batch[pairs].means) for by_batch in found.values()} == {count}
        means = [found[size][pairs].mean for size in (8, 24, 48, None)]
        assert means == sorted(means, reverse=True)
        assert means[0] > means[-1] + 0.3
        assert found[8][pairs].masked_share > found[None][pairs].masked_share


def test_batches_are_those_of_the_clustering_step(tmp_path, prepared):
    """Nearly: runs of k-means begin at other rows."""
    sizes = measure(tmp_path, prepared, [ROWS_OF_TOPIC, 48])
    found, coarse = sizes[ROWS_OF_TOPIC][ROWS_OF_TOPIC], sizes[48][ROWS_OF_TOPIC]
    pipeline_context = PipelineContext(
        str(tmp_path),
        1,
        teacher_loader=TeacherLoader(load, lambda reference: "weights"),
    )
    manifest = make_clustered(pipeline_context, dataset_of(), prepared).manifest
    assert manifest["similarity"]["mean"] == pytest.approx(found.mean, abs=0.02)
    assert manifest["masked_share"] == pytest.approx(found.masked_share, abs=0.02)
    assert coarse.mean < found.mean - 0.05


def test_what_is_measured_is_kept_and_only_further_sizes_are_added(tmp_path, prepared):
    done = []

    def counted(task, units, needs):
        done.extend(unit.key for unit in units)
        yield from in_process(task, units, needs)

    first = measure(tmp_path, prepared, [8], execute=counted)
    assert done[-2:] == ["8", "random"]
    done.clear()
    again = measure(tmp_path, prepared, [8, 24], execute=counted)
    assert done == ["24"], "vectors and sizes that are there are not made again"
    assert again[8] == first[8]
    assert again[None] == first[None]


def test_samples_and_draws_bound_the_work(tmp_path, prepared):
    found = measure(tmp_path, prepared, [8], max_pairs=32, max_batches=3)
    assert {len(one.means) for by_batch in found.values() for one in by_batch.values()} == {3}
    whole = measure(tmp_path, prepared, [8], max_pairs=32)
    assert {len(by_batch[8].means) for by_batch in whole.values()} == {4}
    assert set(found[None][8].means) < set(whole[None][8].means)
