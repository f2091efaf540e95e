"""Samples, scores and choices of index upgrades, on vectors whose relations are known."""

import json
from zlib import crc32

import numpy as np
import pytest
import pytrec_eval
from memory_store import MemoryStore, index_of, made_by

from rayembed.errors import ConfigError, DataError
from rayembed_extras.index_upgrades.compare import FULL, compare_roads
from rayembed_extras.index_upgrades.maps import unit
from rayembed_extras.index_upgrades.measure import (
    as_judgements,
    rank_documents,
    score,
    share_kept,
)
from rayembed_extras.index_upgrades.price import MeasuringCost, Rate, price_roads
from rayembed_extras.index_upgrades.sample import draw_sample, first_sentence
from rayembed_extras.index_upgrades.settings import UpgradeRun
from rayembed_extras.indexing.judged_queries import JudgedQueries, find_queries, read_queries
from rayembed_extras.indexing.layout import layout_of


def vectors(count, width, seed=0):
    return unit(np.random.default_rng(seed).standard_normal((count, width)))


class Hidden:
    """A stand-in for a loaded model: a text is a number, whose hidden vector it turns; a query of
    it is near its document.
    """

    def __init__(self, width, seed, noise=0.0, hidden=10):
        random = np.random.default_rng(seed)
        self.turn = np.linalg.qr(random.standard_normal((max(hidden, width),) * 2))[0]
        self.turn = self.turn[:hidden, :width] if hidden >= width else self.turn[:hidden]
        self.turn = self.turn[:, :width]
        self.noise, self.hidden, self.width = noise, hidden, width
        self.reference, self.asked = f"model {seed}", []

    def vectors(self, texts, role):
        made = []
        for text in texts:
            # Some words of a text may have no number: those are near no document.
            digits = [word for word in text.split() if word.isdigit()] or [crc32(text.encode())]
            number = int(digits[0])
            one = np.random.default_rng(number).standard_normal(self.hidden)
            if role == "query":
                one = one + 0.2 * np.random.default_rng(number + 10**6).standard_normal(self.hidden)
            chance = np.random.default_rng([number, self.width, role == "query"])
            made.append(one @ self.turn + self.noise * chance.standard_normal(self.width))
        return unit(np.array(made))

    def queries(self, texts):
        return self.vectors(texts, "query")

    def documents(self, texts):
        self.asked += texts
        return self.vectors(texts, "document")


TEXTS = [f"Document {number} is the first sentence. And more." for number in range(1200)]


def built(tmp_path, old, texts=TEXTS, **values):
    store = MemoryStore()
    manifest = index_of(store, tmp_path, "docs", texts, old.documents(texts), **values)
    return store, layout_of(manifest.tables["docs_1"])


def sampled(store, layout, **values):
    given = {"judged": set(), "searched": 2000, "fits": 500, "seed": 0}
    return draw_sample(store, "docs_1", layout, **{**given, **values})


def test_scores_are_those_of_trec_eval():
    random = np.random.default_rng(0)
    ranked = np.array([random.permutation(40)[:10] for _ in range(30)])
    ranked[3, 6:] = -1
    relevant = [
        {int(d): int(random.integers(1, 4)) for d in random.permutation(40)[: 1 + q % 14]}
        for q in range(30)
    ]
    ours = score(ranked, relevant)
    judged = {str(q): {str(d): g for d, g in one.items()} for q, one in enumerate(relevant)}
    found = {
        str(q): {str(d): 10.0 - place for place, d in enumerate(row) if d >= 0}
        for q, row in enumerate(ranked.tolist())
    }
    theirs = pytrec_eval.RelevanceEvaluator(judged, {"recall.10", "ndcg_cut.10"}).evaluate(found)
    for query in range(30):
        assert ours.recall[query] == pytest.approx(theirs[str(query)]["recall_10"])
        assert ours.ndcg[query] == pytest.approx(theirs[str(query)]["ndcg_cut_10"])


def test_a_documents_best_row_counts_and_it_is_ranked_once():
    rows, queries = vectors(300, 6), vectors(20, 6, 1)
    owners = np.random.default_rng(2).integers(0, 40, 300)
    ranked = rank_documents(queries, rows, owners)
    for query, row in zip(queries, ranked, strict=True):
        products = rows @ query
        best = [products[owners == document].max() for document in range(40)]
        assert row.tolist() == np.argsort(-np.array(best), kind="stable")[:10].tolist()
    few = rank_documents(queries, rows[:3], np.array([0, 1, 1]))
    assert (np.sort(few[:, :2]) == [0, 1]).all()
    assert (few[:, 2:] == -1).all()


def test_a_sample_of_a_small_index_searches_all_and_fits_on_half(tmp_path):
    store, layout = built(tmp_path, Hidden(8, 1))
    sample = sampled(store, layout, fits=900)
    assert (sample.documents, sample.rows, len(sample.texts)) == (1200, 1200, 1200)
    assert sample.searched.all()
    assert sample.fits.sum() == 600
    by_name = dict(zip(sample.names, zip(sample.texts, sample.old, strict=True), strict=True))
    text, vector = by_name["d7"]
    assert text == TEXTS[7]
    np.testing.assert_allclose(vector, Hidden(8, 1).documents([TEXTS[7]])[0], atol=1e-6)


def test_a_sample_of_a_larger_index_holds_judged_documents_and_fits_on_others(tmp_path):
    store, layout = built(tmp_path, Hidden(8, 1))
    judged = {f"d{number}" for number in range(0, 1200, 40)}
    sample = sampled(store, layout, judged=judged, searched=400, fits=300)
    searched = {name for name, taken in zip(sample.names, sample.searched, strict=True) if taken}
    fitted = {name for name, taken in zip(sample.names, sample.fits, strict=True) if taken}
    assert judged <= searched
    assert (len(searched), len(fitted), searched & fitted) == (400, 300, set())
    again = sampled(MemoryStoreOf(store, 11), layout, judged=judged, searched=400, fits=300)
    assert again.names == sample.names, "batches decide nothing"
    assert (again.old == sample.old).all()
    with pytest.raises(DataError, match=r"2 of 3 judged documents are not in the index \('x', 'y'"):
        sampled(store, layout, judged={"x", "y", "d1"})
    with pytest.raises(DataError, match=r"30 documents, too few .* --road backfill"):
        sampled(*built(tmp_path, Hidden(8, 1), TEXTS[:30]))


def MemoryStoreOf(store, rows_per_batch):
    other = MemoryStore(rows_per_batch)
    other.rows = store.rows
    return other


@pytest.mark.parametrize(("kind", "near"), [("float16", 1e-3), ("int8", 5e-2), ("bits", 0.5)])
def test_stored_number_types_are_read_as_unit_vectors(tmp_path, kind, near):
    model = Hidden(16, 1, hidden=16)
    made = made_by(dimensions=16, number_type=kind)
    sample = sampled(*built(tmp_path, model, TEXTS[:100], made=made))
    right = model.documents(list(sample.texts))
    assert np.abs(sample.old - right).max() < near
    assert ((sample.old * right).sum(axis=1) > 0.6).all()


def test_chunks_stay_with_their_documents_and_texts_may_come_from_elsewhere(tmp_path):
    owners = [f"d{number // 3}" for number in range(300)]
    store, layout = built(
        tmp_path, Hidden(8, 1), TEXTS[:300], owners=owners, documents={"store_text": False}
    )
    sample = sampled(store, layout, texts=lambda ids: {name: f"text of {name}" for name in ids})
    assert (sample.documents, sample.rows) == (100, 300)
    place = sample.names.index("d5")
    rows = np.flatnonzero(sample.owners == place)
    assert sorted(sample.texts[row] for row in rows) == [f"text of r{n}" for n in (15, 16, 17)]


def road(measured, label):
    return next(one for one in measured.roads if one.label == label)


@pytest.mark.parametrize("fit_on", ["both", "documents", "queries"])
def test_a_turned_model_needs_a_map_and_no_backfill(tmp_path, fit_on):
    old, new = Hidden(10, 1), Hidden(10, 2)
    run = UpgradeRun(name="docs", model="new", fit_on=fit_on, sampled_queries=150)
    measured = compare_roads(run, sampled(*built(tmp_path, old)), old, new, None)
    assert road(measured, FULL).scores.recall.mean() == 1, "its own results are the reference"
    assert road(measured, "before the upgrade").share.value == pytest.approx(1.0)
    for kind in ("orthogonal", "affine"):
        assert road(measured, f"map: {kind}").share.value > 0.99, kind
    assert road(measured, "no map (identity)").share.value < 0.1, "the control"
    assert road(measured, "old queries").share.value < 0.1
    assert measured.best.kind != "identity"
    assert measured.mapped.share.interval[0] > 0.97
    assert not measured.judged
    asked = 0 if fit_on == "documents" else measured.fit_rows - 500 * (fit_on == "both")
    assert measured.num_queries == 150
    assert asked == 0 or 500 < asked < 1000, "first sentences, and some words of most documents"
    assert len(new.asked) == 1200


def test_judged_queries_show_what_a_map_loses(tmp_path):
    old, new = Hidden(6, 1, noise=0.3), Hidden(10, 2)
    wanted = range(0, 1200, 8)
    judged = JudgedQueries(
        tuple(TEXTS[number] for number in wanted), tuple({f"d{n}": 1} for n in wanted)
    )
    store, layout = built(tmp_path, old)
    run = UpgradeRun(name="docs", model="new", queries="x", sampled_queries=150)
    sample = sampled(store, layout, judged=judged.documents)
    measured = compare_roads(run, sample, old, new, judged)
    full, before = (road(measured, label) for label in (FULL, "before the upgrade"))
    assert full.scores.recall.mean() > before.scores.recall.mean() + 0.05
    assert all(one.kind != "identity" for one in measured.roads), "dimensions differ"
    assert road(measured, "old queries").scores is None
    assert before.scores.recall.mean() - 0.05 < measured.mapped.scores.recall.mean()
    assert measured.mapped.share.interval[1] < 0.97
    assert measured.mapped.apart.mean < 0
    assert all(f"with the map {measured.best.kind} is" in note for note in measured.notes)
    worse = compare_roads(run, sample, Hidden(6, 1, noise=0.3), Hidden(6, 1, noise=2), judged)
    assert any("after full re-embedding is not clearly better" in note for note in worse.notes)
    without = compare_roads(run, sample, None, new, judged)
    assert road(without, "before the upgrade").scores is None
    assert without.mapped.share.value > measured.mapped.share.value - 0.05, "of documents alone"
    assert "was not loaded" in without.notes[0]


@pytest.mark.parametrize("kind", ["int8", "bits"])
def test_roads_rank_as_a_store_of_the_number_type_does(tmp_path, kind):
    old, new = (Hidden(64, seed, noise=1.3, hidden=64) for seed in (1, 2))
    wanted = range(0, 1200, 8)
    texts = [TEXTS[number] for number in wanted]
    judged = JudgedQueries(tuple(texts), tuple({f"d{n}": 1} for n in wanted))
    made = made_by(dimensions=64, number_type=kind)
    sample = sampled(*built(tmp_path, old, made=made), judged=judged.documents)
    run = UpgradeRun(name="docs", model="new", queries="x", sampled_queries=150)
    measured = compare_roads(run, sample, old, new, judged)
    names = np.array([int(name[1:]) for name in sample.names])

    def recall(queries, documents):
        """By codes and Hamming distances as their definitions have them; ties as in the sample."""
        if kind == "bits":
            codes, asked = (np.packbits(part > 0, axis=1) for part in (documents, queries))
            apart = np.bitwise_count(asked[:, None] ^ codes[None]).sum(axis=2)
        else:
            apart = -queries @ np.rint(documents * 127).clip(-127, 127).T
        return recall_of(np.argsort(apart[:, names], axis=1, kind="stable"))

    def recall_of(order):
        return np.mean([n in names[row[:10]] for n, row in zip(wanted, order, strict=True)])

    of_old, of_new = old.documents(TEXTS), new.documents(TEXTS)
    mapped = measured.best(new.queries(texts))
    for one, queries, documents in (
        (measured.full, new.queries(texts), of_new),
        (road(measured, "before the upgrade"), old.queries(texts), of_old),
        (road(measured, "old queries"), old.queries(texts), of_new),
        (measured.mapped, mapped, of_old),
    ):
        assert one.scores.recall.mean() == pytest.approx(recall(queries, documents)), one.label
    in_floats = recall_of(np.argsort(-new.queries(texts) @ of_new[names].T, axis=1))
    assert 0.3 < measured.full.scores.recall.mean() < in_floats + 0.01
    if kind == "bits":
        assert measured.full.scores.recall.mean() < in_floats - 0.05, "the control"


def test_shares_have_the_interval_of_a_ratio():
    random = np.random.default_rng(0)
    full = random.random(400) < 0.8
    kept = full & (random.random(400) < 0.95)
    scores = [score_of(part.astype(float)) for part in (kept, full)]
    share = share_kept(*scores)
    assert share.value == pytest.approx(kept.mean() / full.mean())
    draws = random.integers(0, 400, (4000, 400))
    ratios = kept[draws].mean(axis=1) / full[draws].mean(axis=1)
    np.testing.assert_allclose(share.interval, np.percentile(ratios, (2.5, 97.5)), atol=0.004)
    assert share_kept(scores[1], scores[1]).interval == (1, 1)
    assert share_kept(scores[0], score_of(np.zeros(400))) is None


def score_of(recall):
    from rayembed_extras.index_upgrades.measure import QueryScores

    return QueryScores(recall, recall)


def test_prices_are_what_measuring_took_and_its_rate():
    rate = Rate(texts=1000, seconds=20.0, tokens_per_text=50.0)
    prices = price_roads(
        rate,
        rows=90_000,
        measuring=MeasuringCost(texts=3000, tokens=70_000.0, seconds=500.0, fit_seconds=300.0),
        old_bytes=100.0,
        new_bytes=200.0,
        map_bytes=7,
    )
    assert prices[0].money is None
    adapter, backfill, both = (price.with_money(3.6) for price in prices)
    assert (adapter.texts, backfill.texts, both.texts) == (3000, 90_000, 93_000)
    assert adapter.hours == pytest.approx(500 / 3600), "with the fits, and the old model's time"
    assert backfill.hours == pytest.approx(90_000 * 0.02 / 3600)
    assert backfill.money == pytest.approx(90_000 * 0.02 / 1000)
    assert both.money == pytest.approx(adapter.money + backfill.money)
    assert (adapter.tokens, backfill.tokens) == (70_000, 90_000 * 50)
    assert (adapter.stored_bytes, backfill.stored_bytes, both.stored_bytes) == (107, 300, 307)


def test_queries_are_read_in_beirs_layout_and_as_rows(tmp_path):
    texts = [*TEXTS[:60], "Lima.", "Rome.", "Rome. "]
    store = MemoryStore()
    index_of(store, tmp_path / "index", "docs", texts, vectors(len(texts), 8))

    def read(path, has_text=True):
        return read_queries(find_queries(str(path), "test"), store, "docs_1", has_text=has_text)

    qrels, rows = tmp_path / "beir/qrels/test.tsv", tmp_path / "rows.jsonl"
    qrels.parent.mkdir(parents=True)
    (tmp_path / "beir/queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{n}", "text": f"query {n}"}) + "\n" for n in range(3))
    )
    qrels.write_text("query-id\tcorpus-id\tscore\nq0\td1\t2\nq0\td2\t0\nq2\td3\t1\nq1\td3\t0\n")
    found = read(tmp_path / "beir")
    assert found == JudgedQueries(("query 0", "query 2"), ({"d1": 2}, {"d3": 1}))
    assert found.documents == {"d1", "d3"}
    with pytest.raises(DataError, match="no judgements of the split 'dev'; qrels/ has test"):
        find_queries(str(tmp_path / "beir"), "dev")
    qrels.write_text("query-id\tcorpus-id\tscore\nq9\td1\t1\n")
    with pytest.raises(DataError, match=r"1 × qrels/test: .*'q9'"):
        read(tmp_path / "beir")
    qrels.write_text("query-id\tcorpus-id\tscore\nq1\td1\t0\n")
    with pytest.raises(DataError, match="none with a relevant document"):
        read(tmp_path / "beir")
    rows.write_text('{"query": "a", "document": 7}\n{"query": "a", "document": "d8"}\n')
    store.scanned.clear()
    assert read(rows).grades == ({"7": 1, "d8": 1},)
    assert store.scanned == [], "texts are compared only where rows name some"
    rows.write_text('{"query": "a", "positive": " Lima. "}\n{"query": "b", "positive": "Rome."}\n')
    assert read(rows).grades == ({"d60": 1}, {"d61": 1, "d62": 1})
    with pytest.raises(ConfigError, match="docs_1' keeps no texts; name them by id"):
        read(rows, has_text=False)
    rows.write_text('{"query": "a", "positive": "Oslo."}\n{"query": " "}\n{"query": "b"}\n')
    with pytest.raises(DataError, match="cannot be used as they stand") as problem:
        read(rows)
    for reason in ("a positive that no document", "no query", "no column 'document'"):
        assert f"1 × rows: {reason}" in str(problem.value)
    with pytest.raises(DataError, match=r"no rows at .*nowhere"):
        find_queries(str(tmp_path / "nowhere"), "test")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Lima is a city. It lies in Peru.", "Lima is a city."),
        ("A Title\nLima is a city. More.", "Lima is a city."),
        ("东京是日本的首都和最大的城市吗？ 是的。", "东京是日本的首都和最大的城市吗？"),
        ("One sentence alone that is all there is", None),
        ("", None),
        ("word " * 100 + ". End.", ("word " * 40).strip()),
    ],
)
def test_first_sentences_stand_as_queries(text, sentence):
    assert first_sentence(text) == sentence


def test_too_few_sentences_are_said(tmp_path):
    texts = [f"Document {number}" for number in range(100)]
    old = Hidden(8, 1)
    sample = sampled(*built(tmp_path, old, texts))
    with pytest.raises(DataError, match=r"first sentence .* \(--queries\)"):
        compare_roads(UpgradeRun(name="docs", model="new"), sample, old, Hidden(8, 2), None)


def test_own_results_are_judgements():
    assert as_judgements(np.array([[3, 1, -1]])) == [{3: 1, 1: 1}]
