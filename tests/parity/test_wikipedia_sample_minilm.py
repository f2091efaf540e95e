"""The scores of all-MiniLM-L6-v2 are those that mteb takes of it through sentence-transformers."""

import mteb
import pytest
from made_up_articles import run_over, wikipedia_over
from run_scoring import evaluate, evaluate_reference, tasks_of
from sentence_transformers import SentenceTransformer

from rayembed.assets.resolver import resolve_model
from rayembed.models.loading.load import load_model
from rayembed.recipes.sample import MINILM, SUMMARIES


@pytest.mark.assets
def test_minilm_scores_as_through_sentence_transformers(tmp_path):
    instructions = {"WikiTopicClustering": "Group the texts"}
    run = run_over(SUMMARIES, sampled=wikipedia_over, max_length=48, instructions=instructions)
    folder = resolve_model(MINILM)
    ours = evaluate_reference(folder, run, name="minilm", results_folder=tmp_path)
    theirs = mteb.evaluate(
        SentenceTransformer(str(folder), device="cpu"), tasks_of(run), cache=None
    )
    for result in theirs.task_results:
        # the same weights in another order of summation; ranks may swap where scores tie
        assert ours[result.task_name] == pytest.approx(result.get_score(), abs=1e-3)
    assert len(theirs.task_results) == len(ours) == 6

    # control: an instruction that the model never saw changes the score
    told = evaluate(load_model(folder), run, name="told", revision="1", results_folder=tmp_path)
    assert told["WikiTopicClustering"] != ours["WikiTopicClustering"]
    assert told["WikiSentenceRetrieval"] == pytest.approx(ours["WikiSentenceRetrieval"])
