"""Search in int8 and in bits, with a second look: against plain sorting of the whole corpus."""

import numpy as np
import pytest
from made_up_corpus import Metadata, made_up_corpus, made_up_queries, search
from mteb.types import PromptType
from tiny_folders import save_biencoder
from word_model import WordSpec

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import parse
from rayembed.config.types import Rescoring, StoredVectors
from rayembed.errors import ConfigError
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel, document_texts
from rayembed.evaluation.pooled.pool import OneWorker
from rayembed.evaluation.run_scores import make_spec
from rayembed.search.stored import nearest_bits

HOW = {
    "int8": StoredVectors(precision="int8"),
    "binary": StoredVectors(precision="binary"),
    "int8 again": StoredVectors(precision="binary", rescore=Rescoring(candidates=20)),
    "float32 again": StoredVectors(
        precision="binary", rescore=Rescoring(candidates=20, precision="float32")
    ),
    "bits again": StoredVectors(
        precision="binary", rescore=Rescoring(candidates=20, precision="binary")
    ),
}


def pooled(spec, pool=OneWorker):
    return PooledModel(spec, pool(EncodingWorker(spec, None, "cpu")))


def vectors(corpus, queries):
    """Unit vectors of queries and documents in float64, as float32 rounds them."""
    spec = WordSpec()
    given = (
        spec.load("cpu")(texts, spec.encode_spec(Metadata("MadeUp"), side))
        for texts, side in (
            (list(queries["text"]), PromptType.query),
            (document_texts(corpus, range(len(corpus))), PromptType.document),
        )
    )
    return [v / np.linalg.norm(np.float64(v), axis=1, keepdims=True) for v in given]


def signs(v):
    return np.where(v > 0, 1.0, -1.0) / np.sqrt(v.shape[1])


def rounded(v):
    reach = min(1, 8 / np.sqrt(v.shape[1]))
    return np.clip(np.round(v * 127 / reach), -127, 127) * reach / 127


def by_sorting(corpus, queries, how, k):
    """Rows and scores of each query's best: the whole corpus is sorted, ties by row."""
    asked, documents = vectors(corpus, queries)
    first = rounded if how == "int8" else signs
    scores = np.round(first(asked) @ first(documents).T, 12)
    second = {"int8 again": rounded, "float32 again": lambda v: v, "bits again": signs}.get(how)
    found = []
    for row, of in enumerate(scores):
        order = np.lexsort((np.arange(len(of)), -of))
        values = of[order]
        if second is not None:
            candidates, rest = order[:20], order[20:]
            again = np.round(second(documents[candidates]) @ asked[row], 7)
            best = np.lexsort((candidates, -again))
            order = np.concatenate([candidates[best], rest])
            values = np.concatenate([again[best], of[rest] - 4])
        found.append((order[:k], values[:k]))
    return found


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("k", [10, 700])
def test_a_search_is_a_sort_of_the_whole_corpus(how, k):
    corpus, queries = made_up_corpus(3000), made_up_queries(5)
    found = search(pooled(WordSpec(stored=HOW[how])), corpus, queries, k)
    for name, (rows, values) in zip(
        queries["id"], by_sorting(corpus, queries, how, k), strict=True
    ):
        assert list(found[name].values()) == pytest.approx(values, abs=1e-5)
        if how == "binary":  # whole numbers: ties are as above, to the last document
            assert list(found[name]) == [f"d{row}" for row in rows]
        else:
            assert len(set(found[name]) & {f"d{row}" for row in rows}) >= k - 1


class Backwards(OneWorker):
    """Takes calls three at a time, before the first of them is answered, and the last one first."""

    def run(self, calls, queries=None, context=None):
        calls, waiting = iter(calls), []
        for call in calls:
            waiting.append(call)
            if len(waiting) == 3:
                yield from super().run(waiting[::-1], queries, context)
                waiting = []
        yield from super().run(waiting[::-1], queries, context)


@pytest.mark.parametrize("how", HOW)
def test_the_order_in_which_workers_answer_decides_nothing(how):
    corpus, queries = made_up_corpus(3000), made_up_queries(5)
    spec = WordSpec(stored=HOW[how])
    found = search(pooled(spec), corpus, queries, 50)
    again = search(pooled(spec, Backwards), corpus, queries, 50)
    assert [list(of.items()) for of in found.values()] == [
        list(of.items()) for of in again.values()
    ]


@pytest.mark.parametrize("how", HOW)
def test_given_documents_are_scored_as_a_search_scores_them(how):
    corpus, queries = made_up_corpus(300), made_up_queries(2)
    spec = WordSpec(stored=HOW[how])
    ranked = {"q0": [f"d{row}" for row in range(0, 300, 20)], "q1": ["d1", "d2"]}
    found = search(pooled(spec), corpus, queries, 15, top_ranked=ranked)
    asked, documents = vectors(corpus, queries)
    first, second = {
        "int8": (rounded, rounded),
        "binary": (signs, signs),
        "int8 again": (np.array, rounded),
        "float32 again": (np.array, np.array),
        "bits again": (np.array, signs),
    }[how]
    scores = first(asked) @ second(documents).T
    for row, name in enumerate(("q0", "q1")):
        assert set(found[name]) == set(ranked[name])
        for document, score in found[name].items():
            assert score == pytest.approx(scores[row, int(document[1:])], abs=1e-5)


def test_other_tasks_get_the_numbers_that_stored_vectors_stand_for():
    texts = ["a b", "b c d", "e"]

    def embedded(**stored):
        spec = WordSpec(stored=StoredVectors(**stored))
        return pooled(spec).encode(
            [{"text": texts}], task_metadata=Metadata("MadeUp"), hf_split="t", hf_subset="s"
        )

    plain = np.float64(embedded())
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).max() > 0.05  # as the model gives them
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(embedded(precision="binary"), signs(unit), atol=1e-6)
    np.testing.assert_allclose(embedded(precision="int8"), rounded(unit), atol=1e-6)


@pytest.mark.parametrize(("count", "width", "k"), [(500, 8, 5), (500, 64, 30), (7, 8, 20)])
def test_all_that_tie_for_the_last_place_come(count, width, k):
    drawn = np.random.default_rng(0)
    documents = drawn.integers(0, 256, (count, width // 8), np.uint8)
    queries = drawn.integers(0, 256, (20, width // 8), np.uint8)
    found = nearest_bits(queries, documents, k)
    distances = np.bitwise_count(queries[:, None] ^ documents[None]).sum(-1)
    limits = np.sort(distances, axis=1)[:, : min(k, count)][:, -1]
    wanted = {(q, d, distances[q, d]) for q, d in np.argwhere(distances <= limits[:, None])}
    assert set(zip(found.row, found.place, found.distance, strict=True)) == wanted
    assert len(found.row) == len(wanted)
    if count == 500:
        assert len(wanted) > 20 * k, "the control: some tie"


def test_results_of_small_vectors_have_a_revision_of_their_own(tmp_path):
    folder = str(save_biencoder(tmp_path / "model"))

    def spec(**settings):
        return make_spec(parse(ModelUnderTest, {"reference": folder, **settings}))

    again = {"precision": "binary", "rescore": {"precision": "float32", "candidates": 8}}
    cases = [
        ({}, ""),
        ({"precision": "int8"}, "int8-"),
        ({"precision": "binary"}, "binary1-"),
        (again, "binary1-rescored8-float32-"),
        ({"precision": "int8", "dimensions": 16}, "first16-int8-"),
    ]
    plain = spec()
    for settings, slug in cases:
        found = spec(**settings)
        weights = plain.meta.revision.partition("-")[0]
        assert found.meta.revision.startswith(f"{slug}{weights}-")
        assert found.stored.precision == settings.get("precision", "float32")
        # Vectors are the same, and so are those that are kept.
        assert (found.fingerprint == plain.fingerprint) == ("dimensions" not in settings)
    assert "precision" not in plain.conditions
    assert spec(**again).conditions["rescored"] == "8 with float32"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "int4"}, "float32.*int8.*binary"),
        ({"precision": "int8", "rescore": {}}, "rescore improves a search with precision 'binary'"),
        ({"rescore": {}}, "precision is 'float32'"),
        ({"precision": "binary", "rescore": {"candidates": 0}}, "candidates"),
        ({"reference": "bm25", "precision": "int8"}, "bm25 has no vectors"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse(ModelUnderTest, {"reference": "m", **settings})
