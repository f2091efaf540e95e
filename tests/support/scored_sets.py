"""Retrieval sets scored by given rankings, as findings about scores read them."""

import json

import mteb
from tiny_folders import save_biencoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.own_sets import RetrievalSet
from rayembed.evaluation.jobs import TASK_RESULT, ScoreTask
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.plan import Scoring
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.score import ModelScores
from rayembed.results.writer import open_results


class Ranked:
    """A search whose scores are given: query → document → score."""

    def __init__(self, name, found):
        self.mteb_model_meta = model_meta(name, "1")
        self._found = found

    def index(self, corpus, **_options):
        del corpus

    def search(self, queries, **_options):
        return {query: dict(self._found[query]) for query in queries["id"]}


def save_word_model(folder):
    """A tiny bi-encoder, of 20 tokens, for which each word is one token."""
    save_biencoder(folder)
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["model"]["max_input_chars_per_word"] = 1
    file.write_text(json.dumps(settings))
    return folder


def falling(documents):
    """Scores of documents, the best first."""
    return {document: 1 - 0.01 * place for place, document in enumerate(documents)}


def own_task(folder, name="planted"):
    return OwnTask(RetrievalSet(name=name, path=str(folder)))


def scored(folder, name, task, rankings, model=None):
    """Scores of a model of a name that ranks documents as given.

    Args:
        model: folder of a saved model, which says what is cut; None: not known.
    """
    ranked = Ranked(name, {query: falling(documents) for query, documents in rankings.items()})
    result = mteb.TaskResult.from_dict(ScoreTask(task).run(ranked)[TASK_RESULT])
    with open_results(folder, ranked.mteb_model_meta) as writer:
        scoring = Scoring(task, (task,))
        scoring.take(task, result, writer)
        place = writer.place
    spec = None if model is None else make_spec(ModelUnderTest(reference=str(model)))
    return ModelScores(ranked.mteb_model_meta, str(place), place, tasks=[scoring], model=spec)
