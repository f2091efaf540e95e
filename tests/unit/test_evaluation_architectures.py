"""mteb's own check of models passes for every architecture, behind a pool of workers."""

import json

import pytest
from mteb.models.models_protocols import EncoderProtocol, SearchProtocol
from plain_spec_model import check_with_mock_tasks
from tiny_folders import ARCHITECTURES
from word_model import WordSpec

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.model import ModelConfig
from rayembed.config.settings import kind_of, members
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import OneWorker
from rayembed.evaluation.run_scores import make_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:mteb")


class Noted(EncodingWorker):
    """A worker that notes the roles of its texts and the widths of their vectors."""

    def __init__(self, spec):
        super().__init__(spec, None, "cpu")
        self.roles, self.widths = set(), set()

    def embed(self, unit):
        vectors = super().embed(unit)
        self.roles.add(unit.bucket.encode_spec.role)
        self.widths.add(vectors.shape[1])
        return vectors


def test_no_architecture_is_left_out():
    embed = [config for config in members(ModelConfig) if config.embeds]
    assert {kind_of(config) for config in embed} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_mtebs_check_of_models_passes(kind, tmp_path):
    folder = ARCHITECTURES[kind](tmp_path / kind)
    assert json.loads((folder / "rayembed.json").read_text())["model"]["kind"] == kind
    spec = make_spec(ModelUnderTest(reference=str(folder)))
    worker = Noted(spec)
    model = PooledModel(spec, OneWorker(worker))
    assert isinstance(model, EncoderProtocol)
    assert isinstance(model, SearchProtocol)
    ran = check_with_mock_tasks(model)
    assert len(ran) >= 15
    assert {"MockRetrievalTask", "MockRerankingTask", "MockSTSTask", "MockClusteringTask"} <= ran
    assert worker.roles == {"query", "document"}
    assert worker.widths == {spec.meta.embed_dim}


def test_the_check_would_see_a_model_that_fails():
    class Broken(WordSpec):
        def load(self, device):
            embed = super().load(device)
            return lambda texts, encode_spec: embed(texts, encode_spec) * float("nan")

    spec = Broken()
    with pytest.raises(AssertionError, match="NaN or infinity"):
        check_with_mock_tasks(PooledModel(spec, OneWorker(EncodingWorker(spec, None, "cpu"))))
