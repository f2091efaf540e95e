"""Mining in units and shards: the cut, equal results whatever it is, approximate searches."""

import itertools
import logging
import sys
from pathlib import Path

import mining_by_hand as by_hand
import numpy as np
import pytest
from benchmarks.beyond import cost_of
from mining_step import configured, mine, pipeline_context, prepared

from rayembed.assets import local_copies
from rayembed.data.mining import candidate_search
from rayembed.data.mining import corpus as corpora
from rayembed.data.mining.candidate_search import SHARD_STEP, MiningCut, Shard, cut_mining
from rayembed.data.mining.corpus import CorpusFiles, open_corpus
from rayembed.data.vectors.embed import embed_parts
from rayembed.errors import ArtifactError, ConfigError, PlacementError
from rayembed.search import tiles
from rayembed.search.exact import merged_top_k, top_k, top_k_of_blocks
from rayembed.search.kinds import Hnsw, Ivf
from rayembed.search.tiles import Tiles

SMALL = Tiles(chunk=8, documents=4, scores=64, queries=4)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    open_corpus.cache_clear()


def parts_of(rows: int) -> list[int]:
    return [8192] * (rows // 8192) + [rows % 8192] * bool(rows % 8192)


def test_a_cut_has_each_part_once_and_shards_where_a_search_cuts() -> None:
    for rows, documents, indexed in itertools.product(
        [1, 8192, 20_000, 262_145, 500_000, 10_000_000], [0, 1_000_000, 8_800_000], [False, True]
    ):
        made = cut_mining(parts_of(rows), documents, indexed=indexed)
        numbers = [number for unit in made.units for number in unit]
        assert numbers == list(range(len(parts_of(rows))))
        assert max(map(len, made.units)) <= 16
        assert [shard.first for shard in made.shards[1:]] == [one.stop for one in made.shards[:-1]]
        assert (made.shards[0].first, made.shards[-1].stop) == (0, None)
        assert all(shard.first % SHARD_STEP == 0 for shard in made.shards)
        sizes = np.diff([shard.first for shard in made.shards])
        assert (sizes >= candidate_search.SHARD_DOCUMENTS - SHARD_STEP).all()
    assert cut_mining([], 5).units == ()
    billion = cut_mining([8192] * 122_071, 10**9)
    assert {len(unit) for unit in billion.units[:-1]} == {64}
    # Parts of a large source have four times as many rows, units as many as before.
    larger = cut_mining([4 * 8192] * 30_518, 10**9)
    assert {len(unit) for unit in larger.units[:-1]} == {16}
    assert [unit.stop - unit.start for unit in cut_mining([4 * 8192] * 40, 0).units] == [1] * 40
    assert len(cut_mining([4 * 8192] * 640, 0).units[0]) == 4


def test_half_a_million_queries_read_a_large_corpus_four_times_and_not_62_times() -> None:
    rows, documents = parts_of(500_000), 8_800_000
    made = cut_mining(rows, documents)
    assert [len(unit) for unit in made.units] == [16, 16, 16, 14]
    each = MiningCut(tuple(range(n, n + 1) for n in range(len(rows))), (Shard(0, None),))
    now, before = (cost_of(one, rows, documents, 768, 100) for one in (made, each))
    assert now.products == before.products == 500_000 * documents
    assert before.bytes_read > 12 * now.bytes_read
    assert now.bytes_written < 0.1 * now.bytes_read
    assert now.units == 4 * (8 + 1)


@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "index"])
def test_units_shards_and_mapped_metadata_change_nothing(
    approximate, tmp_path, monkeypatch
) -> None:
    rows = by_hand.made_up_rows(60, 3, labels=True, given=True)
    changes = {"near_duplicate": 0.5, "further_teachers": [{"teacher": "b"}], "candidates": 30}
    if approximate:  # all lists are searched for all documents, so that nothing is missed
        changes["search"] = {"kind": "ivf", "lists": 2, "probes": 2}
        changes["candidates"] = 100
    config = configured(**changes)
    whole, manifest = mine(tmp_path / "whole", rows, config, 7)
    monkeypatch.setattr(tiles, "CPU", SMALL)
    monkeypatch.setattr(candidate_search, "UNIT_QUERIES", 3 * 8192)
    monkeypatch.setattr(candidate_search, "UNITS", 3 if approximate else 8)
    monkeypatch.setattr(candidate_search, "SHARD_STEP", 8)
    monkeypatch.setattr(candidate_search, "SHARD_DOCUMENTS", 16)
    monkeypatch.setattr(candidate_search, "PARTS_OF_TEXTS", 2)
    monkeypatch.setattr(corpora, "_MAPPED_DOCUMENTS", 1)
    monkeypatch.setattr(corpora, "_RANGE_DOCUMENTS", 10)
    searched = cut_mining([9] * 7, 60, indexed=approximate)
    assert len(searched.shards) > 1
    assert len(searched.units) == 4
    cut_up, manifest_of_units = mine(tmp_path / "cut", rows, config, 7)
    assert cut_up == whole
    assert (tmp_path / "cache/mining").exists()
    for name in manifest.keys() - {"seconds", "search"}:
        assert manifest_of_units[name] == manifest[name], name
    # The control: what only the first shard has.
    monkeypatch.setattr(candidate_search, "merged_top_k", lambda first, second: first)
    if not approximate:
        assert mine(tmp_path / "first", rows, config, 7)[0] != whole


def unit_vectors(count: int, width: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


@pytest.mark.parametrize("two_passes", [False, True])
def test_blocks_and_shards_equal_one_search_bit_for_bit(two_passes, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "CPU", Tiles(chunk=2048, documents=512, scores=1 << 14, queries=16))
    monkeypatch.setattr(tiles, "rounds_first", lambda device: two_passes)
    queries, documents = unit_vectors(50, 24, 0), unit_vectors(5000, 24, 1)
    documents[4000] = documents[17]  # a tie over two shards
    queries[3] = documents[17]
    blocks = [queries[:20], queries[20:20], queries[20:]]
    found = top_k_of_blocks(blocks, [documents[:999], documents[999:]], 9)
    for block, (scores, ids) in zip(blocks, found, strict=True):
        wanted = top_k(block, [documents], 9)
        assert scores.tobytes() == wanted[0].tobytes()
        assert ids.tobytes() == wanted[1].tobytes()
    first = top_k_of_blocks([queries], [documents[:4096]], 9)[0]
    second = top_k_of_blocks([queries], [documents[4096:]], 9, first_id=4096)[0]
    both = merged_top_k(first, second)
    assert both[0].tobytes() == top_k(queries, [documents], 9)[0].tobytes()
    assert both[1].tobytes() == top_k(queries, [documents], 9)[1].tobytes()
    assert both[1].max() >= 4096 > both[1].min()


@pytest.mark.parametrize("ranges", [1, 3, 1000])
def test_metadata_of_a_corpus_are_those_of_its_texts(ranges, tmp_path, monkeypatch) -> None:
    rows = by_hand.made_up_rows(40, 1, labels=True)
    before = prepared(tmp_path, rows, 3)
    vectors = embed_parts(pipeline_context(tmp_path), "d", before.parts, configured())
    monkeypatch.setattr(corpora, "_RANGE_DOCUMENTS", ranges)
    monkeypatch.setattr(corpora, "_MAPPED_DOCUMENTS", 1)
    made = open_corpus(CorpusFiles(tuple(before.parts), (), vectors))
    assert isinstance(made.text_hash, np.memmap)
    distinct = [h for part in before.parts for h in vectors.texts(part).text_hash.tolist()]
    distinct = list(dict.fromkeys(distinct))
    assert made.text_hash.tolist() == distinct
    assert made.sorted_hash.tolist() == sorted(distinct)
    assert made.ids_of(np.array(distinct)).tolist() == list(range(len(distinct)))
    everything = np.concatenate(list(made.shards(vectors)))
    assert len(everything) == len(distinct)
    for first, stop in ((0, 7), (5, 23), (12, None)):
        some = np.concatenate(list(made.shards(vectors, first, stop)))
        assert some.tobytes() == everything[first:stop].tobytes()


def test_a_corpus_that_does_not_fit_a_machine_is_refused_before_it_is_read(tmp_path, monkeypatch):
    before = prepared(tmp_path, by_hand.made_up_rows(40, 1, labels=True), 3)
    vectors = embed_parts(pipeline_context(tmp_path), "d", before.parts, configured())
    files = CorpusFiles(tuple(before.parts), (), vectors)
    documents = sum(part.rows for part in before.parts)
    monkeypatch.setattr(corpora, "_MAPPED_DOCUMENTS", 1)
    monkeypatch.setattr(corpora, "free_memory", lambda device: 68 * documents - 1)
    with pytest.raises(PlacementError, match=f"of {documents} documents .* on machines with more"):
        open_corpus(files)
    monkeypatch.setattr(corpora, "free_memory", lambda device: 68 * documents)
    assert len(open_corpus(files).text_hash)


@pytest.mark.parametrize("search", [Ivf(), Hnsw()], ids=["ivf", "hnsw"])
def test_an_index_is_the_same_twice_and_its_scores_are_products(search) -> None:
    documents, queries = unit_vectors(3000, 16, 0), unit_vectors(40, 16, 1)
    index = search.index(documents, 7)
    assert index == search.index(documents, 7)
    scores, places = search.find(search.open(index), queries, 10)
    products = queries.astype(np.float32) @ documents.astype(np.float32).T
    # Both sum 16 products of float32.
    np.testing.assert_allclose(scores, np.take_along_axis(products, places, 1), atol=1e-6)
    assert (np.diff(scores, axis=1) <= 0).all()
    best = np.argsort(-products, axis=1)[:, :10]
    recall = np.mean([np.isin(one, other).mean() for one, other in zip(best, places, strict=True)])
    assert recall > 0.5
    few = search.find(search.open(search.index(documents[:3], 7)), queries, 10)
    assert (few[1][:, 3:] == -1).all()
    assert np.isneginf(few[0][:, 3:]).all()


def test_recall_is_measured_told_and_kept(tmp_path, caplog) -> None:
    rows = by_hand.made_up_rows(80, 5)
    exact, plain = mine(tmp_path / "exact", rows, configured(), 3)
    assert "search" not in plain
    all_lists = configured(search={"kind": "ivf", "lists": 6, "probes": 6})
    same, manifest = mine(tmp_path / "all", rows, all_lists, 3)
    assert [[n.text for n in r.negatives] for r in same] == [
        [n.text for n in r.negatives] for r in exact
    ]
    (measured,) = manifest["search"]["measured"]
    assert measured == {
        "queries": 80,
        "candidates": 100,
        "recall": 1.0,
        "recall_of_10_best": 1.0,
    }
    caplog.set_level(logging.WARNING)
    one_list = configured(candidates=20, search={"kind": "ivf", "lists": 12, "probes": 1})
    _, manifest = mine(tmp_path / "one", rows, one_list, 3)
    assert manifest["search"]["probes"] == 1
    assert 0 < manifest["search"]["measured"][0]["recall"] < 0.9
    assert "raise mining.search.probes" in caplog.text


def test_without_faiss_an_approximate_search_is_refused_before_vectors_are_made(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    rows = by_hand.made_up_rows(9, 0)
    with pytest.raises(ConfigError, match=r"mining\.search.*'\.\[cpu\]'"):
        mine(tmp_path, rows, configured(search="hnsw"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="search=exact"):
        configured(pool="given", search="ivf")


def test_remote_files_are_copied_once_read_again_when_broken_and_leave_room(
    tmp_path, monkeypatch
) -> None:
    path, reads = tmp_path / "storage" / "vectors.npy", []
    path.parent.mkdir()
    path.write_bytes(b"first")
    monkeypatch.setattr(local_copies, "is_remote", lambda path: True)
    monkeypatch.setattr(local_copies, "LEFT_FREE", 0.0)  # however full this disk is

    def read(place: str) -> bytes:
        reads.append(place == str(path))
        content = Path(place).read_bytes()
        if content == b"wrong":
            raise ArtifactError("bad")
        return content

    assert [local_copies.read_copied(str(path), read) for _ in range(2)] == [b"first"] * 2
    assert reads == [False, False]
    (copy,) = (tmp_path / "cache/copies").rglob("vectors.npy")
    copy.write_bytes(b"wrong")
    assert local_copies.read_copied(str(path), read) == b"first"
    assert reads[2:] == [False, True]
    assert not copy.exists()
    path.write_bytes(b"another")  # made anew
    assert local_copies.read_copied(str(path), read) == b"another"
    monkeypatch.setattr(local_copies, "LEFT_FREE", 1.0)
    path.write_bytes(b"no room for it")
    assert local_copies.read_copied(str(path), read) == b"no room for it"
    assert reads[4:] == [False, True]
