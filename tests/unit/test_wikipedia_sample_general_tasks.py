"""General tasks of a guarded run: in the language and of the kind of its own data."""

import json
import logging
from types import SimpleNamespace

import pytest
from made_up_articles import HELD_OUT, write_articles
from own_pairs import own_run
from run_scoring import tasks_of

from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import override
from rayembed.data.languages import language_of
from rayembed.errors import ConfigError
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.pipeline.evaluate.general_tasks import other_language, with_fitting_tasks
from rayembed.pipeline.evaluate.guard import judge
from rayembed.pipeline.register.licences import data_licences
from rayembed.pipeline.run import dry_run
from rayembed.recipes.catalogue import get_recipe
from rayembed.recipes.sample import LANGUAGE_CODES, TASK_NAMES
from rayembed_extras.wikipedia_sample.references import parse_reference

TEXTS = {
    "eng-Latn": ["how do I reset my password", "where is the invoice of last month"],
    "fra-Latn": ["comment changer le mot de passe", "où est la facture du mois dernier"],
    "spa-Latn": ["cómo puedo cambiar mi contraseña", "dónde está la factura del mes pasado"],
    "deu-Latn": ["wie kann ich mein Passwort ändern", "wo liegt mir die Rechnung von dem Monat"],
    "ita-Latn": ["come posso cambiare la mia password", "dove trovo la fattura del mese scorso"],
    "por-Latn": ["como posso mudar a minha senha", "onde está a fatura do mês passado"],
    "nld-Latn": ["hoe kan ik mijn wachtwoord wijzigen", "waar is de factuur van het jaar"],
}


@pytest.mark.parametrize("language", TEXTS)
def test_the_language_is_told_by_frequent_words(language):
    assert language_of(TEXTS[language]) == language


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["忘れた場合はどうしますか"],
        ["x86 simd popcount"],
        [*TEXTS["fra-Latn"], *TEXTS["eng-Latn"]],
    ],
)
def test_no_language_is_told_where_none_is_clear(texts):
    assert language_of(texts) == ""


def own_set(folder, texts, kind):
    """An own set whose queries or first texts these are."""
    if kind == "sts":
        rows = [
            {"sentence1": text, "sentence2": text[::-1], "score": i} for i, text in enumerate(texts)
        ]
        (folder / "graded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{{name: mine, kind: sts, path: {folder}/graded.jsonl}}"
    judged = folder / "judged"
    (judged / "qrels").mkdir(parents=True)
    for name in ("corpus", "queries"):
        rows = [{"_id": f"{i}", "text": text} for i, text in enumerate(texts)]
        (judged / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grades = "".join(f"{i}\t{i}\t1\n" for i in range(len(texts)))
    (judged / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + grades)
    return f"{{name: mine, path: {judged}}}"


def fitted(folder, language, kind="retrieval", named="", guard="{}"):
    """A run with an own set and the sample's tasks, before and after."""
    for name in ("en-us", "fr-fr", "es-es"):
        write_articles(folder / f"{name}.json")
    source = f"{folder}/{{language}}.json"
    sizes = f"source={source}&held_out={HELD_OUT}&documents=100&queries=50{named}"
    run = with_named_benchmarks(
        own_run(
            folder,
            f"evaluation.own_sets=[{own_set(folder, TEXTS[language], kind)}]",
            f'evaluation.benchmarks=["wikipedia?{sizes}"]',
            f"evaluation.guard={guard}",
        )
    )
    return run, with_fitting_tasks(run, [])


@pytest.mark.parametrize(
    ("language", "kind", "taken", "told"),
    [
        ("fra-Latn", "retrieval", "fr", "in the language of the own data (fra-Latn)"),
        ("spa-Latn", "sts", "es", "in the language of the own data (spa-Latn)"),
        ("eng-Latn", "retrieval", "", "in the language of the own data (eng-Latn)"),
        ("deu-Latn", "retrieval", "", "in English, as the sample has none in deu-Latn"),
    ],
)
def test_tasks_are_of_the_language_and_kind_of_the_own_data(
    tmp_path, caplog, language, kind, taken, told
):
    caplog.set_level(logging.INFO)
    _, run = fitted(tmp_path, language, kind)
    general = [own for own in run.evaluation.own_sets if own.name != "mine"]
    expected = TASK_NAMES[:2] if kind == "retrieval" else TASK_NAMES[2:]
    assert [own.name for own in general] == list(expected)
    assert {parse_reference(own.path).part.language or "en" for own in general} == {taken or "en"}
    code = LANGUAGE_CODES[taken or "en"]
    assert {own.language for own in general} == {code}
    assert told in caplog.text
    assert {task.metadata.eval_langs[0] for task in tasks_of(run)} >= {code}
    whole = [own for own in general if hasattr(own, "train")]
    assert all(parse_reference(own.train).part.language == taken for own in whole)


@pytest.mark.parametrize(
    ("language", "changes", "told"),
    [
        ("fra-Latn", {}, ""),
        ("eng-Latn", {}, ""),
        ("deu-Latn", {}, "general tasks in eng-Latn, own data in deu-Latn"),
        ("deu-Latn", {"guard": "null"}, ""),
        (
            "fra-Latn",
            {"named": "&language=en"},
            "general tasks in eng-Latn, own data in fra-Latn",
        ),
    ],
)
def test_a_verdict_says_where_general_tasks_are_in_another_language(
    tmp_path, language, changes, told
):
    _, run = fitted(tmp_path, language, **changes)
    assert other_language(run, []) == told
    if run.evaluation.guard is None:
        return
    models = {UNTRAINED: (0.5, 0.5), ScoreKey("finetune"): (0.7, 0.4)}
    scores = {
        key: SimpleNamespace(
            scores={"mine": mine, "pairs-held-out": mine, "other": other}, items={}
        )
        for key, (mine, other) in models.items()
    }
    verdict = judge(run, scores, told)
    bare = judge(run, scores)
    assert verdict.summary == bare.summary + (f" ({told})" if told else "")
    for number, few in {199: "own data has only 199 queries", 200: ""}.items():
        scores[UNTRAINED].items = {"mine": [[0.5] * (number - 9), [0.5] * 9], "other": [[0.5]]}
        said = judge(run, scores, told).summary.removeprefix(bare.summary)
        assert few in said
        assert bool(said) == bool(few or told)
        assert told in said


@pytest.mark.parametrize("changes", [{"named": "&language=en"}, {"guard": "null"}])
def test_tasks_that_name_a_language_and_runs_without_a_guard_stay_as_they_are(tmp_path, changes):
    before, after = fitted(tmp_path, "fra-Latn", **changes)
    assert after is before


def test_a_sample_set_that_is_own_data_stays(tmp_path):
    run, _ = fitted(tmp_path, "fra-Latn")
    own = override(run, ["evaluation.guard.own_sets=[mine, WikiTopicClustering]"])
    names = [one.name for one in with_fitting_tasks(own, []).evaluation.own_sets]
    assert "WikiTopicClustering" in names
    assert "WikiTopicClassification" not in names


@pytest.mark.parametrize("recipe", ["biencoder", "biencoder-corpus"])
def test_the_sample_is_the_general_tasks_of_runs_on_own_data(recipe):
    run = get_recipe(recipe)
    assert run.evaluation.benchmarks == ("wikipedia",)
    assert [own.kind for own in with_named_benchmarks(run).evaluation.own_sets].count("sts") == 1


def test_an_own_set_with_the_name_of_a_task_is_refused():
    mine = "evaluation.own_sets=[{name: WikiSentenceRetrieval, path: judged}]"
    with pytest.raises(ConfigError, match="'WikiSentenceRetrieval' is also the name of a task"):
        with_named_benchmarks(override(get_recipe("biencoder"), [mine]))


def test_the_licence_of_the_samples_texts_is_known():
    run = get_recipe("nvembed-quickstart")
    assert data_licences(run) == {dataset.name: "cc-by-sa-4.0" for dataset in run.data.datasets}


@pytest.mark.parametrize("changes", [{}, {"named": "&language=en"}, {"guard": "null"}])
def test_a_dry_run_says_which_tasks_the_run_chooses_among(tmp_path, changes):
    run, after = fitted(tmp_path, "fra-Latn", **changes)
    chosen = [own.name for own in run.evaluation.own_sets if own not in after.evaluation.own_sets]
    said = dry_run._scores(run)
    assert "WikiSentenceRetrieval" in said
    assert ("with your data's language and kind" in said) == bool(chosen)
    _, _, among = said.partition("those of ")
    assert [name for name in chosen if name not in among] == []
    assert "mine" not in among
