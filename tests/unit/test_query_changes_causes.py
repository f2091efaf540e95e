"""Changed queries: each planted cause is named, with both rankings, and no other."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from beir_set import write_beir
from scored_sets import own_task, save_word_model, scored

from rayembed.config.evaluation import ModelUnderTest
from rayembed.data.engine.parts import write_part
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record
from rayembed.errors import DataError
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.query_results import BEST_OF_QUERIES, QueryResult, query_results
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.tables import ScoreKey
from rayembed.pipeline.evaluate.findings import ScoredModels, make_findings
from rayembed_extras.query_changes import changes
from rayembed_extras.query_changes.causes import (
    CUT,
    EXACT_WORDS,
    FALSE_NEGATIVE,
    LANGUAGE,
    NEAR_COPY,
    NONE,
    Evidence,
    causes_of,
)
from rayembed_extras.query_changes.cut_texts import cut_texts
from rayembed_extras.query_changes.findings import PAGE, changes_of_run
from rayembed_extras.query_changes.search_data import search_data

FILLERS = {f"f{n}": f"filler paragraph about subject {n}" for n in range(12)}
LONG = "a committee published its yearly account of " + " ".join(f"item{n}" for n in range(40))
NEAR = "parcels handed over before noon leave the depot on that day and reach most homes later"
DOCUMENTS = {
    **FILLERS,
    "p-cut": LONG,
    "p-words": "the XJ90 gearbox carries a guarantee",
    "p-near": NEAR,
    "n-near": NEAR.replace("most homes", "many homes") + ".",
    "p-false": "wolves hunt in packs",
    "p-french": "le contrat est signé par les deux parties et il est dans le dossier",
    "p-russian": "кошка спит на диване",
    "p-none": "granite is formed slowly",
    "p-gain": LONG.replace("item", "entry"),
    "p-same": "an unchanged answer",
}
QUERIES = {
    "q-cut": "annual figures",
    "q-words": "guarantee XJ90",
    "q-near": "when will my order arrive",
    "q-false": "how do predators feed",
    "q-french": "what is the agreement in the file",
    "q-russian": "where is the pet",
    "q-none": "how are stones made",
    "q-gain": "lists of facts",
    "q-same": "something stable",
}
PLANTED = {
    "q-cut": CUT,
    "q-words": EXACT_WORDS,
    "q-near": NEAR_COPY,
    "q-false": FALSE_NEGATIVE,
    "q-french": LANGUAGE,
    "q-russian": LANGUAGE,
    "q-none": NONE,
    "q-gain": CUT,
}
OTHERS = list(FILLERS)


def rankings(lost):
    """Each query's positive first, of the lost ones behind three others or not at all."""
    found = {}
    for query in QUERIES:
        positive = query.replace("q-", "p-")
        found[query] = [positive, *OTHERS[:9]]
        if query in lost:
            found[query] = [*OTHERS[:4], positive, *OTHERS[4:9]]
        if query == "q-near":
            first = ["n-near", positive] if query in lost else [positive, "n-near"]
            found[query] = [*first, *OTHERS[:8]]
        if query == "q-words" and query in lost:
            found[query] = OTHERS[:10]
    return found


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan with a row whose hard negative is a positive of the set, in another case."""
    folder = tmp_path_factory.mktemp("plan")
    negatives = {"how do dogs feed": "Wolves hunt in  packs", "what do birds eat": "seeds, mostly"}
    rows = [
        Record(
            f"t/{n}", query, (f"answer {n}",), "t", (Negative(text), Negative(DOCUMENTS["p-none"]))
        )
        for n, (query, text) in enumerate(negatives.items())
    ]
    config = PlanConfig(
        weights={"t": 1.0},
        global_pairs=2,
        num_negatives=1,  # so the second negative of a row is not trained
        num_steps=3,
        seed=0,
        in_batch_negatives=True,
        key="s",
    )
    return write_plan(str(folder / "plan"), {"t": [write_part(str(folder / "t"), rows)]}, config)


@pytest.fixture(scope="module")
def subject(tmp_path_factory, plan):
    folder = tmp_path_factory.mktemp("planted")
    judged = {query: {query.replace("q-", "p-"): 1} for query in QUERIES}
    judged["q-none"] |= {"f0": 0, "p-russian": 1}  # the latter is in no ranking
    task = own_task(write_beir(folder / "set", DOCUMENTS, QUERIES, judged))
    model = save_word_model(folder / "model")
    lost = [query for query in PLANTED if query != "q-gain"]
    models = {
        "start": scored(folder, "start", task, rankings(["q-gain"]), model),
        "trained": scored(folder, "trained", task, rankings(lost), model),
    }
    return ScoredModels(
        models, "trained", "start", str(model), str(folder), None, {"s": plan.folder}
    )


@pytest.fixture(scope="module")
def found(subject):
    """Changes as they are computed, and the finding."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rayembed_extras.query_changes.findings.changes_page",
            lambda *labels_and_tasks: seen.append(labels_and_tasks[2]) or "",
        )
        finding = changes_of_run(subject)
    ((task,),) = seen
    return task, finding


def test_each_planted_cause_is_named_and_no_other(found):
    task, _ = found
    named = {c.query: [cause.kind for cause in c.causes] for c in (*task.losses, *task.gains)}
    assert named == {query: [kind] for query, kind in PLANTED.items()}
    assert (task.queries, task.worse, task.better) == (9, 7, 1)
    details = {c.query: c.causes[0].detail for c in task.losses}
    assert re.match(
        r"both models read 20 of \d+ tokens of the relevant document p-cut", details["q-cut"]
    )
    assert details["q-words"] == (
        "BM25 has p-words at rank 1, it not among the first ten; common words: guarantee, xj90"
    )
    assert details["q-near"].startswith("n-near at rank 1 has 9")
    assert "how do dogs feed" in details["q-false"]
    assert "eng-Latn, the relevant document p-french fra-Latn" in details["q-french"]
    assert "p-russian cyrillic" in details["q-russian"]


def test_the_table_counts_the_causes_of_the_shown_queries(found):
    _, finding = found
    counts = {row[0]: row[1:3] for row in finding.table.rows}
    assert counts == {
        CUT: [1, 1],
        EXACT_WORDS: [1, 0],
        NEAR_COPY: [1, 0],
        FALSE_NEGATIVE: [1, 0],
        LANGUAGE: [2, 0],
        NONE: [1, 0],
    }
    assert (
        "planted: 7 of 9 queries are worse with trained than with start, 1 better"
        in finding.lines[0]
    )


def test_a_judged_document_is_no_near_duplicate_and_an_untrained_one_no_false_negative(
    subject, found
):
    task, _ = found
    (near,) = (c for c in task.losses if c.query == "q-near")
    assert near.after.best[0] == "n-near"
    # `p-none` is a hard negative that the plan holds and that no step trains.
    (none,) = (c for c in task.losses if c.query == "q-none")
    assert [cause.kind for cause in none.causes] == [NONE]
    # The gain's document is cut as well by the model that has it first; only losses are trained.
    assert [c.query for c in task.gains] == ["q-gain"]


class Seen(HTMLParser):
    """Text of a page, the addresses that it names, and its tags."""

    def __init__(self):
        super().__init__()
        self.text, self.addresses, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_and_has_both_rankings(subject):
    made = make_findings(subject, ["query_changes"])
    assert [finding.title for finding in made] == ["Changed queries"]
    page = (subject.judged.local / PAGE).read_text()
    seen = Seen()
    seen.feed(page)
    assert not seen.addresses
    assert not {"script", "link", "img"} & {*seen.tags}
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert seen.tags.count("ol") == 2 * len(PLANTED) + 1, "and relevant ones in neither ranking"
    text = " ".join(seen.text)
    for query in PLANTED:
        assert QUERIES[query] in text
    assert QUERIES["q-same"] not in text
    assert "…" in text, "long texts are shortened"
    assert page.count("<ul") == len(PLANTED) - 1, "no list where there is no cause"


def test_without_scores_of_the_start_there_is_nothing_to_compare(subject):
    alone = ScoredModels({"trained": subject.judged}, "trained", None, "m", "s")
    assert changes_of_run(alone) is None
    same = ScoredModels({"a": subject.judged, "b": subject.judged}, "a", "b", "m", "s")
    assert changes_of_run(same).table is None


def test_where_a_run_keeps_its_start_the_refused_model_is_compared_with_it(subject):
    start, trained = subject.models.values()
    label = ScoreKey("s").label(["s"])
    run = SimpleNamespace(stages=[SimpleNamespace(name="s")])
    kept = ScoredModels(
        {"untrained": start, label: trained}, "untrained", "untrained", "m", "s", run
    )
    finding = changes_of_run(kept)
    assert f"worse with {label} than with untrained" in finding.lines[0]
    assert finding.lines[-1].endswith(f"{start.results}/{PAGE}"), "beside the kept model's results"


def test_results_of_older_versions_are_left_out_and_named(tmp_path):
    task = own_task(write_beir(tmp_path / "set", FILLERS, {"q": "what"}, {"q": {"f1": 1}}))
    models = {
        "one": scored(tmp_path, "one", task, {"q": ["f1"]}),
        "two": scored(tmp_path, "two", task, {"q": ["f2", "f1"]}),
    }
    ((entry,),) = models["one"].tasks[0].results[task].scores.values()
    del entry[BEST_OF_QUERIES]
    finding = changes_of_run(ScoredModels(models, "two", "one", "m", str(tmp_path)))
    assert finding.table is None
    assert finding.lines[0].startswith("left out: planted, whose results were stored without")


def test_a_task_whose_data_are_gone_stops_no_other(tmp_path, monkeypatch):
    judged = {"q": {"f1": 1}}
    sets = [write_beir(tmp_path / name, FILLERS, {"q": "what"}, judged) for name in ("one", "two")]
    tasks = [own_task(folder, folder.name) for folder in sets]
    models = {}
    for name, best in (("start", ["f1"]), ("trained", ["f2", "f1"])):
        parts = [scored(tmp_path, name, task, {"q": best}) for task in tasks]
        parts[0].tasks += parts[1].tasks
        models[name] = parts[0]
    subject = ScoredModels(models, "trained", "start", "m", str(tmp_path))

    def load(self):
        if self.name == "one":
            raise DataError("there is no set")
        return whole(self)

    whole = OwnTask.load
    monkeypatch.setattr(OwnTask, "load", load)
    finding = changes_of_run(subject)
    assert finding.lines[0].startswith("two: 1 of 1 queries are worse")
    assert finding.lines[-1] == "left out: one: there is no set"
    subject.judged.model = make_spec(
        ModelUnderTest(reference=str(save_word_model(tmp_path / "model")))
    )
    assert cut_texts(subject).lines == ("one is not counted: there is no set",)


def test_texts_of_data_are_escaped(tmp_path):
    documents = {"d1": "<script>alert(1)</script>", "d2": "other & more", **FILLERS}
    task = own_task(write_beir(tmp_path / "set", documents, {"q": "<b>what</b>"}, {"q": {"d1": 1}}))
    models = {
        "one": scored(tmp_path, "one", task, {"q": ["d1", "d2"]}),
        "<two>": scored(tmp_path, "two", task, {"q": ["d2", "d1"]}),
    }
    finding = changes_of_run(ScoredModels(models, "<two>", "one", "m", str(tmp_path)))
    page = finding.files[PAGE]
    assert "<script" not in page
    assert "<b>what" not in page
    assert "&lt;two&gt;" in page


def test_only_the_largest_changes_are_shown_and_all_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "SHOWN", 2)
    monkeypatch.setattr(changes, "MOST_DOCUMENTS", 3)
    queries = {f"q{n}": f"question {n}" for n in range(5)}
    task = own_task(write_beir(tmp_path / "set", FILLERS, queries, {q: {"f0": 1} for q in queries}))
    first = dict.fromkeys(queries, OTHERS[:10])
    later = {q: [*OTHERS[1 : 2 + n], "f0"] for n, q in enumerate(queries)}
    models = {
        "one": scored(tmp_path, "one", task, first),
        "two": scored(tmp_path, "two", task, later),
    }
    page = changes_of_run(ScoredModels(models, "two", "one", "m", str(tmp_path))).files[PAGE]
    assert "question 4" in page
    assert "question 3" in page
    assert "question 2" not in page
    assert "5 queries: 5 worse, 0 better, 0 as before" in page
    assert "BM25 does not search more than 3 documents" in page


def test_bm25_ranks_as_the_baseline_does(subject):
    scoring = subject.judged.tasks[0]
    (data,) = search_data(scoring.factory)
    found = changes.bm25_results(data, ["q-words", "q-none"])
    assert found["q-words"].best[0] == "p-words"
    same = replace(data, queries={"p-words": QUERIES["q-words"]})
    assert changes.bm25_results(same, ["p-words"])["p-words"].best[0] == "p-words"
    other = replace(same, without_own_id=True)
    assert "p-words" not in changes.bm25_results(other, ["p-words"])["p-words"].best
    assert len(found["q-none"].best) < 10, "documents without a common word are left out"
    assert query_results(scoring.result.scores["test"][0])["q-words"].best == tuple(OTHERS[:10])


def test_common_words_of_scripts_without_spaces_are_found_and_named(tmp_path):
    documents = {
        "d0": "发票将在三个工作日内寄出。",
        "d1": "产品支持两年保修。",
        "d2": "忘记登录密码，请点击找回。",
    }
    task = own_task(write_beir(tmp_path / "set", documents, {"q": "登录密码"}, {"q": {"d2": 1}}))
    (data,) = search_data(task)
    lexical = changes.bm25_results(data, ["q"])["q"]
    assert lexical.best == ("d2",)
    evidence = Evidence(
        query="q",
        text=data.queries["q"],
        judged=data.judged["q"],
        worse=QueryResult(0.0, ("d0", "d1")),
        better=QueryResult(1.0, ("d2",)),
        texts=documents,
        lexical=lexical,
    )
    (cause,) = causes_of(evidence)
    assert cause.kind == EXACT_WORDS
    assert cause.detail.endswith("common words: 登录, 录密, 密码")
