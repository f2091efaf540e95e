"""A folder of sentence-transformers as a model under evaluation, beside mteb's own way with it."""

import mteb
import numpy as np
import pytest
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.models import SentenceTransformerEncoderWrapper
from mteb.types import PromptType
from plain_spec_model import PlainSpecModel, few_experiments
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tiny_models import save_encoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import parse
from rayembed.evaluation.run_scores import make_spec

TEXTS = [
    "Paris",
    "",
    "are cats larger than dogs and where do they live",
    "the quick brown fox jumps over the lazy dog " * 6,
    "7 wonders",
]
QUERY, DOCUMENT = PromptType.query, PromptType.document
SCIFACT = mteb.get_task("SciFact").metadata
STS = mteb.get_task("STS12").metadata
EXACT = 2e-6
"""Of unit vectors in fp32: micro-batches of other shapes sum in another order."""
QUIET = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:mteb"),
    pytest.mark.filterwarnings("ignore:Model prompts specified"),
    pytest.mark.filterwarnings("ignore:The `get_sentence_embedding_dimension`"),
    pytest.mark.filterwarnings("ignore:The fill_missing parameter"),
    pytest.mark.filterwarnings("ignore:SentenceTransformers that use prompts"),
    pytest.mark.filterwarnings("ignore:Task name passage is not valid"),
]


def spec_of(reference, **settings):
    return make_spec(parse(ModelUnderTest, {"reference": str(reference), **settings}))


def save_sentence_folder(folder):
    """A folder of sentence-transformers with prompts by task, type and side."""
    save_encoder(folder / "bert")
    transformer = Transformer(str(folder / "bert"), max_seq_length=48)
    prompts = {
        "query": "query: ",
        "document": "passage: ",
        "STS": "the same: ",
        "SciFact-query": "claim: ",
    }
    model = SentenceTransformer(
        modules=[transformer, Pooling(32, "mean"), Normalize()], prompts=prompts, device="cpu"
    )
    model.save(str(folder / "model"))
    return folder / "model"


def seeded_mock_run(model):
    """Results by task. mteb keeps its mock tasks, which go on drawing where the last run ended."""
    for task in ALL_MOCK_TASK_TEST_GRID:
        fresh = type(task)()
        task.rng_state, task.np_rng = fresh.rng_state, fresh.np_rng
    with few_experiments():
        return mteb.mock_run(model).task_results


def scores_by_place(result):
    return {
        (split, entry["hf_subset"]): entry["main_score"]
        for split, entries in result.scores.items()
        for entry in entries
    }


def check_scores_as_with_mteb(reference, folder):
    """The mock tasks of all kinds, by a reference of the folder and by sentence-transformers."""
    plain = SentenceTransformerEncoderWrapper(SentenceTransformer(str(folder)))
    theirs = seeded_mock_run(plain)
    ran = {name for name, result in theirs.items() if isinstance(result, mteb.TaskResult)}
    assert len(ran) >= 15
    ours = seeded_mock_run(PlainSpecModel(spec_of(reference)))
    for name in ran:
        assert isinstance(ours[name], mteb.TaskResult), (name, ours[name])
        found, expected = scores_by_place(ours[name]), scores_by_place(theirs[name])
        assert found == pytest.approx(expected, abs=1e-6), name


def check_vectors_as_with_mteb(spec, folder):
    """Vectors and prompts of queries, documents and texts of symmetric tasks."""
    embed = spec.load("cpu")
    plain = SentenceTransformerEncoderWrapper(SentenceTransformer(str(folder)))
    for metadata, side in ((SCIFACT, QUERY), (SCIFACT, DOCUMENT), (STS, None)):
        expected = plain.encode(
            _batches(TEXTS), task_metadata=metadata, hf_split="", hf_subset="", prompt_type=side
        )
        found = embed(TEXTS, spec.encode_spec(metadata, side))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=EXACT)
    shown = [spec.shown(spec.encode_spec(SCIFACT, side)) for side in (QUERY, DOCUMENT)]
    assert [*shown, spec.shown(spec.encode_spec(STS, None))] == [
        "claim: ",
        "passage: ",
        "the same: ",
    ]


def _batches(texts):
    from datasets import Dataset
    from torch.utils.data import DataLoader

    return DataLoader(Dataset.from_dict({"text": texts}), batch_size=2)
