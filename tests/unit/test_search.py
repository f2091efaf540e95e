"""Exact search equals a sort of all scores."""

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayembed.errors import DataError
from rayembed.machine.hardware import rounded_products
from rayembed.search import tiles, two_passes
from rayembed.search.exact import top_k
from rayembed.search.order import NO_RESULT
from rayembed.search.tiles import Tiles, documents_above, gpu_tiles
from rayembed.search.two_passes import exact_products
from rayembed.training.memory.graph_room import LiveBytes


def brute_force(queries: np.ndarray, corpus: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    ids = np.full((len(queries), k), NO_RESULT, dtype=np.int64)
    for row, query in enumerate(queries):
        found = [(-float(np.dot(query, document)), i) for i, document in enumerate(corpus)]
        for place, (score, i) in enumerate(sorted(found)[:k]):
            scores[row, place], ids[row, place] = -score, i
    return scores, ids


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    k=st.integers(1, 40),
)
def test_equals_brute_force_with_ties(seed: int, sizes: list[int], k: int) -> None:
    # Small whole numbers: products are exact in float32, and many scores are equal.
    rng = np.random.default_rng(seed)
    shards = [rng.integers(-2, 3, (n, 4)).astype(np.float32) for n in sizes]
    queries = rng.integers(-2, 3, (7, 4)).astype(np.float32)
    scores, ids = top_k(queries, shards, k)
    expected_scores, expected_ids = brute_force(queries, np.concatenate(shards), k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)
    assert scores.dtype == np.float32
    assert ids.dtype == np.int64


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    corpus = rng.integers(-2, 3, (100, 4)).astype(np.float16)
    queries = rng.integers(-2, 3, (11, 4)).astype(np.float16)
    whole = top_k(queries, [corpus], 20)
    monkeypatch.setattr(tiles, "CPU", Tiles(chunk=40, documents=7, scores=21, queries=3))
    tiled = top_k(queries, [corpus[:33], corpus[33:]], 20)
    np.testing.assert_array_equal(whole[1], tiled[1])
    np.testing.assert_array_equal(whole[0], tiled[0])


def test_all_equal_gives_the_lowest_ids() -> None:
    scores, ids = top_k(np.ones((1, 3)), [np.ones((50, 3)), np.ones((50, 3))], 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    assert scores.tolist() == [[3.0] * 5]


def test_corpus_smaller_than_k_is_filled_up() -> None:
    scores, ids = top_k(np.ones((2, 3)), [np.ones((2, 3))], 4)
    assert ids.tolist() == [[0, 1, NO_RESULT, NO_RESULT]] * 2
    assert scores[0].tolist() == [3.0, 3.0, -np.inf, -np.inf]


def test_wrong_width_and_k_are_errors() -> None:
    with pytest.raises(DataError, match=r"shape \(2, 4\), expected \(n, 3\)"):
        top_k(np.ones((1, 3)), [np.ones((2, 4))], 1)
    with pytest.raises(DataError, match="k is 0"):
        top_k(np.ones((1, 3)), [np.ones((2, 3))], 0)


def unit_vectors(count: int, width: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with bfloat16 units, with chunks of some tiles."""
    monkeypatch.setattr(tiles, "bfloat16_speed", lambda: 2.4)
    monkeypatch.setattr(tiles, "_RESULTS_OF_PIECE", 1.0)
    monkeypatch.setattr(tiles, "CPU", Tiles(chunk=700, documents=256, scores=2048, queries=8))
    monkeypatch.setattr(two_passes, "TILE_DOCUMENTS", 256)
    monkeypatch.setattr(two_passes, "_SLACK", 5)
    monkeypatch.setattr(two_passes, "_SECOND_SLACK", 30)


@pytest.mark.usefixtures("in_two_passes")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1000), size=st.integers(1, 1500), k=st.integers(1, 60))
def test_two_passes_equal_brute_force(seed: int, size: int, k: int) -> None:
    corpus, queries = unit_vectors(size, 48, seed), unit_vectors(11, 48, seed + 1)
    scores, ids = top_k(queries, [corpus[: size // 3], corpus[size // 3 :]], k)
    expected_scores, expected_ids = brute_force(queries, corpus, k)
    np.testing.assert_allclose(scores, expected_scores, atol=2e-6)
    # Random scores may be a rounding apart, and then in either order.
    found = brute_force(queries, corpus, min(k + 1, size))[0]
    if np.abs(np.diff(found, axis=1)).min(initial=1.0) > 2e-6:
        np.testing.assert_array_equal(ids, expected_ids)


@pytest.mark.usefixtures("in_two_passes")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1000), size=st.integers(1, 900), k=st.integers(1, 60))
def test_two_passes_put_the_lower_id_first_among_equals(seed: int, size: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    # Exact in bfloat16 too, and every document twice: ties, but with room between them.
    corpus = rng.integers(-90, 90, (size, 16)).astype(np.float16).repeat(2, 0)[:size]
    corpus = corpus[rng.permutation(size)]
    queries = rng.integers(-90, 90, (9, 16)).astype(np.float32)
    scores, ids = top_k(queries, [corpus], k)
    expected_scores, expected_ids = brute_force(queries, corpus.astype(np.float32), k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)


def hidden_by_rounding(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents that are all the same in bfloat16, of which the later ones are better."""
    corpus = np.ones((count, 4), dtype=np.float32)
    corpus[:, 0] += np.linspace(0, 1e-3, count, dtype=np.float32)
    return np.ones((3, 4), dtype=np.float32), corpus


@pytest.mark.usefixtures("in_two_passes")
def test_what_rounding_hides_is_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, corpus = hidden_by_rounding(600)
    expected = list(range(599, 589, -1))
    assert top_k(queries, [corpus], 10)[1].tolist() == [expected] * 3
    # The control: without the margin the first pass would be believed.
    monkeypatch.setattr(two_passes, "_margin", lambda queries, *_: torch.zeros(len(queries)))
    assert top_k(queries, [corpus], 10)[1].tolist() != [expected] * 3


def test_the_margin_holds_for_every_product() -> None:
    """Also for long vectors; and it is no more than some times what rounding does."""
    for seed, scale in ((0, 1.0), (1, 30.0)):
        queries = torch.from_numpy(scale * unit_vectors(50, 96, seed))
        chunk = two_passes.CorpusChunk.of(
            torch.from_numpy(scale * unit_vectors(3000, 96, seed + 5)), 50
        )
        rounded = (queries.bfloat16() @ chunk.tiles[0].T).float()[:, :3000]
        apart = (queries @ chunk.exact.T - rounded).abs()
        margin = torch.stack(
            [two_passes._margin(queries, rounded[:, i], chunk) for i in range(3000)], 1
        )
        assert (apart <= margin).all()
        assert margin.mean() < 40 * apart.mean()


@pytest.mark.usefixtures("in_two_passes")
def test_a_first_pass_that_proves_little_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, corpus = hidden_by_rounding(600)
    asked = []
    search = tiles.best_of_chunk

    def counted(some: torch.Tensor, *rest: object) -> object:
        asked.append(len(some))
        return search(some, *rest)

    monkeypatch.setattr(tiles, "best_of_chunk", counted)
    found = top_k(np.repeat(queries, 9, 0), [corpus], 10)[1]
    assert found.tolist() == [list(range(599, 589, -1))] * 27
    assert asked == [8]


@pytest.mark.usefixtures("in_two_passes")
def test_no_queries_and_no_documents_find_nothing() -> None:
    scores, ids = top_k(np.ones((0, 3)), [np.ones((300, 3))], 2)
    assert scores.shape == ids.shape == (0, 2)
    assert top_k(np.ones((1, 3)), [np.ones((0, 3))], 2)[1].tolist() == [[NO_RESULT] * 2]


def test_most_queries_need_no_second_look() -> None:
    queries = torch.from_numpy(unit_vectors(64, 384, 0))
    chunk = two_passes.CorpusChunk.of(torch.from_numpy(unit_vectors(20_000, 384, 1)), 64)
    assert two_passes.best_of_chunk(queries, chunk, 20)[2].all()


@pytest.fixture
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Tiles:
    """The CPU takes tiles as a GPU with little memory would, and rounds first as it does."""
    monkeypatch.setattr(tiles, "TILE_DOCUMENTS", 256)
    monkeypatch.setattr(two_passes, "TILE_DOCUMENTS", 256)
    found = gpu_tiles(3 << 20, width=16)
    monkeypatch.setattr(tiles, "CPU", found)
    monkeypatch.setattr(tiles, "rounds_first", lambda device: True)
    return found


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_gpus_tiles_give_ids_and_scores_of_float32_bit_for_bit(
    gpu_on_cpu: Tiles, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    # Whole numbers whose products are exact in float32 but not in bfloat16, and every one twice.
    corpus = rng.integers(-700, 700, (5000, 16)).astype(kind).repeat(2, 0)
    corpus = corpus[rng.permutation(len(corpus))]
    queries = rng.integers(-700, 700, (300, 16)).astype(np.float32)
    scores = queries.astype(np.float64) @ corpus.astype(np.float64).T
    expected = np.lexsort((np.broadcast_to(np.arange(len(corpus)), scores.shape), -scores))[:, :10]
    asked = []
    search = tiles.best_of_chunk

    def counted(some: torch.Tensor, *rest: object) -> object:
        found = search(some, *rest)
        asked.append((len(some), int(found[2].sum())))
        return found

    monkeypatch.setattr(tiles, "best_of_chunk", counted)
    found, ids = top_k(queries, np.array_split(corpus, 3), 10)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(found, np.take_along_axis(scores, expected, 1))
    assert len(corpus) > gpu_on_cpu.chunk, "several chunks are merged"
    assert sum(proven for _, proven in asked) > 0.5 * sum(number for number, _ in asked)
    # The control: rounded products alone give other documents.
    halves = torch.from_numpy(queries).bfloat16() @ torch.from_numpy(corpus).bfloat16().T
    rounded = halves.float().numpy()
    places = np.broadcast_to(np.arange(len(corpus)), rounded.shape)
    alone = np.lexsort((places, -rounded))[:, :10]
    assert (np.sort(alone) != np.sort(expected)).any(1).mean() > 0.05


@pytest.mark.usefixtures("gpu_on_cpu")
def test_memory_of_a_gpus_search_does_not_grow_with_the_corpus(gpu_on_cpu: Tiles) -> None:
    peaks = []
    for chunks in (2, 4):
        corpus = np.zeros((1, 16), np.float16).repeat(chunks * gpu_on_cpu.chunk, 0)
        corpus[:] = np.random.default_rng(0).standard_normal(corpus.shape)
        queries = unit_vectors(2 * gpu_on_cpu.queries, 16, 1)
        with LiveBytes() as live:
            top_k(queries, [corpus], 5)
        peaks.append(live.peak)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    assert peaks[1] < peaks[0] + (1 << 20)


def test_tiles_of_a_gpu_follow_its_memory_and_the_width() -> None:
    roomy, narrow = gpu_tiles(60 << 30, 1024), gpu_tiles(60 << 30, 256)
    assert (roomy.chunk, roomy.queries) == (172_032, 3072)
    assert narrow.chunk == 262_144
    full = gpu_tiles(1 << 30, 1024)
    for sizes, free in ((roomy, 60 << 30), (full, 1 << 30), (gpu_tiles(1 << 30, 4096), 1 << 30)):
        assert sizes.chunk % two_passes.TILE_DOCUMENTS == 0
        assert 2 * sizes.chunk * sizes.queries <= min(tiles._GPU_BYTES, free)
        assert 4 * sizes.scores <= min(tiles._GPU_BYTES, free)


def test_documents_above_a_score_are_those_of_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, corpus = (
        torch.from_numpy(unit_vectors(9, 8, 0)),
        torch.from_numpy(unit_vectors(100, 8, 1)),
    )
    every = queries @ corpus.T
    # A little below the seventh: other tiles round otherwise.
    lowest = every.sort(dim=1, descending=True).values[:, 6] - 1e-6
    lowest[0] = -torch.inf
    sizes = Tiles(chunk=100, documents=30, scores=60, queries=2)
    parts = list(documents_above(queries, corpus, lowest, sizes))
    rows, scores, places = (torch.cat(column) for column in zip(*parts, strict=True))
    found = torch.full_like(every, torch.nan)
    found[rows, places] = scores
    torch.testing.assert_close(
        found, every.where(every >= lowest[:, None], torch.nan), equal_nan=True, atol=1e-6, rtol=0
    )
    assert len(rows) == 100 + 8 * 7


@pytest.mark.parametrize("inside", [exact_products, partial(rounded_products, "tf32", "cuda")])
def test_products_are_set_where_the_process_used_torchs_newer_setting(inside) -> None:
    parts = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    for asked in ("tf32", "ieee"):
        torch.set_float32_matmul_precision("highest" if asked == "tf32" else "high")
        try:
            parts[0].fp32_precision = asked
            set_before = [part.fp32_precision for part in parts]
            with pytest.raises(RuntimeError, match="mix of the legacy and new"):
                torch.backends.cuda.matmul.allow_tf32  # noqa: B018  it is read
            with inside():
                expected = "ieee" if inside is exact_products else "tf32"
                assert parts[0].fp32_precision == expected
                assert torch.get_float32_matmul_precision(), "can be read by others"
            assert [part.fp32_precision for part in parts] == set_before
        finally:
            torch.set_float32_matmul_precision(before)


def test_a_process_that_allows_rounding_searches_exactly_and_keeps_its_settings() -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not matmul.allow_bf16_reduced_precision_reduction
        assert torch.get_float32_matmul_precision() == "medium"
        assert matmul.allow_bf16_reduced_precision_reduction == before[1]
    finally:
        torch.set_float32_matmul_precision(before[0])


def test_shards_are_read_while_others_are_searched_and_their_errors_arrive() -> None:
    threads = []

    def shards(fail: bool) -> Iterator[np.ndarray]:
        for number in range(4):
            threads.append(threading.current_thread())
            if fail and number == 2:
                raise DataError("broken file")
            yield np.full((tiles.CPU.chunk, 2), number, np.float32)

    assert top_k(np.ones((1, 2)), shards(False), 1)[1].tolist() == [[3 * tiles.CPU.chunk]]
    assert threading.main_thread() not in threads
    with pytest.raises(DataError, match="broken file"):
        top_k(np.ones((1, 2)), shards(True), 1)
