"""The teacher of mining, from a folder of sentence-transformers."""

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import save_encoder

from rayembed.config.mining import MiningConfig
from rayembed.config.settings import parse
from rayembed.data.vectors.teacher import load_teacher

TEXTS = ["where do cats live", "Paris is the capital of France"]


def test_prefixes_of_the_settings_replace_those_of_the_folder(tmp_path):
    encoder = save_encoder(tmp_path / "encoder")
    model = SentenceTransformer(
        modules=[Transformer(str(encoder)), Pooling(32, "mean")],
        device="cpu",
        prompts={"query": "the fox: ", "document": ""},
    )
    model.save(str(tmp_path / "teacher"))

    def vectors(**settings):
        config = parse(MiningConfig, {"teacher": str(tmp_path / "teacher"), **settings})
        encode = load_teacher(config)
        return encode(TEXTS, "query"), encode(TEXTS, "document")

    def expected(prefix):
        return model.encode([prefix + text for text in TEXTS], normalize_embeddings=True, prompt="")

    # The teacher works in bf16.
    for settings, queries in (({}, "the fox: "), ({"query_prefix": "the dog: "}, "the dog: ")):
        found = vectors(**settings)
        assert (found[0] * expected(queries)).sum(1).min() > 0.999
        assert (found[1] * expected("")).sum(1).min() > 0.999
    assert (expected("the fox: ") * expected("the dog: ")).sum(1).max() < 0.999
    assert (expected("the fox: ") * expected("")).sum(1).max() < 0.999
