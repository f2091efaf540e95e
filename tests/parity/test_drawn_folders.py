"""Folders of sentence-transformers with drawn settings: its vectors, or a refusal by name.

Each setting that a folder may state is tried alone, then several together by fixed seeds. Whatever
is drawn, vectors are those of sentence-transformers, or the folder is refused by a message that
names the setting.
"""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from mlflow.exceptions import MlflowException
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tiny_models import metaspace_tokenizer, save_decoder, save_encoder, wordpiece_tokenizer
from tokenizers import processors

import rayembed
from rayembed.config.backbone import BackboneConfig, ProjectionConfig
from rayembed.config.evaluation import ModelUnderTest
from rayembed.errors import ArtifactError, DataError, RayembedError
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.run_scores import make_spec
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.load import check_loadable, load_model, saved_widths
from rayembed.models.passes.encoding import encode
from rayembed.registry.pyfunc_model import OpenAIEmbeddings

TOLERANCE = 2e-6
"""Of unit vectors in fp32: sums run over other numbers of padded tokens."""
TEXTS = [
    "Paris",
    "are Cats larger than dogs and where do they live",
    "7 wonders [MASK] </s> of the ancient world",
    " ".join(f"the quick brown fox jumps over {i} lazy dogs" for i in range(12)),
    "  Paris,\tFrance \n",
    *("the world " * i + "fox" for i in range(1, 5)),
]
TOP, TRANSFORMER, POOLING, DENSE, NORMALIZE, TOKENIZER, CONFIG, MODULES = (
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "3_Normalize/config.json",
    "tokenizer_config.json",
    "config.json",
    "modules.json",
)
SETTINGS = [
    (TOP, "truncate_dim", 8),
    (TOP, "truncate_dim", 500),
    (TOP, "truncate_dim", None),
    (TOP, "prompts", {"query": "Query: ", "document": "the text "}),
    (TOP, "prompts", {"query": None, "clustering": "Sort: "}),
    (TOP, "default_prompt_name", "document"),
    (TOP, "default_prompt_name", "query"),
    (TOP, "similarity_fn_name", "dot"),
    (TOP, "similarity_fn_name", "euclidean"),
    (TRANSFORMER, "max_seq_length", 12),
    (TRANSFORMER, "max_seq_length", None),
    (TRANSFORMER, "do_lower_case", False),
    (TRANSFORMER, "do_lower_case", True),
    (TRANSFORMER, "unpad_inputs", False),
    (TRANSFORMER, "processing_kwargs", {}),
    (POOLING, "pooling_mode", "cls"),
    (POOLING, "pooling_mode", "max"),
    (POOLING, "pooling_mode", "lasttoken"),
    (POOLING, "pooling_mode", "weightedmean"),
    (POOLING, "pooling_mode", ["cls"]),
    (DENSE, "activation_function", "torch.nn.modules.linear.Identity"),
    (DENSE, "activation_function", "torch.nn.modules.activation.GELU"),
    (DENSE, "activation_function", "torch.nn.modules.activation.ReLU"),
    (NORMALIZE, "module_input_name", "sentence_embedding"),
    (TOKENIZER, "model_max_length", 20),
    (TOKENIZER, "do_lower_case", False),
    (TOKENIZER, "add_bos_token", True),
    (TOKENIZER, "additional_special_tokens", ["fox"]),
    (TOKENIZER, "clean_up_tokenization_spaces", True),
    (CONFIG, "is_decoder", True),
    (CONFIG, "hidden_act", "relu"),
    (CONFIG, "layer_norm_eps", 0.1),
    (CONFIG, "rms_norm_eps", 0.1),
    (CONFIG, "num_hidden_layers", 1),
    (CONFIG, "output_hidden_states", True),
    (CONFIG, "use_cache", True),
    (CONFIG, "dtype", "float16"),
    (CONFIG, "is_causal", False),
    (CONFIG, "sliding_window", 3),
    (CONFIG, "hidden_dropout_prob", 0.5),
    (CONFIG, "chunk_size_feed_forward", 3),
    (CONFIG, "_attn_implementation", "eager"),
]
"""Settings that are applied, with values."""
OTHERS = [
    (TOP, "truncate_dim", 0),
    (TOP, "truncate_dim", True),
    (TOP, "prompts", ["Query: "]),
    (TOP, "similarity_fn_name", "manhattan"),
    (TOP, "model_type", "SparseEncoder"),
    (TOP, "normalize_prompts", True),
    (TRANSFORMER, "query_length", 9),
    (TRANSFORMER, "document_length", 9),
    (TRANSFORMER, "processing_kwargs", {"text": {"max_length": 9}}),
    (TRANSFORMER, "tokenizer_args", {"model_max_length": 9}),
    (TRANSFORMER, "config_args", {"num_hidden_layers": 1}),
    (TRANSFORMER, "modality_config", {"text": {"method": "forward", "method_output_name": "x"}}),
    (TRANSFORMER, "max_seq_length", 11.5),
    (TRANSFORMER, "strip_accents", True),
    (POOLING, "pooling_mode", ["cls", "mean"]),
    (POOLING, "pooling_mode", "median"),
    (POOLING, "include_prompt", False),
    (POOLING, "pooling_mode", "mean_sqrt_len_tokens"),
    (POOLING, "layers", [1, 2]),
    (DENSE, "use_residual", True),
    (DENSE, "activation_function", "torch.nn.modules.activation.Sigmoid"),
    (DENSE, "module_output_name", "token_embeddings"),
    (DENSE, "scale", 2),
    (NORMALIZE, "module_input_name", "token_embeddings"),
    (TOKENIZER, "truncation_side", "left"),
    (TOKENIZER, "padding_side", "left"),
    (TOKENIZER, "split_special_tokens", True),
    (TOKENIZER, "model_input_names", ["input_ids"]),
    (CONFIG, "pad_token_id", 5),
]
"""Settings that are refused, or change nothing there, as padding on the left of relative positions.
"""


def _tokens(tokenizer):
    """The tokenizer with a maximum length; a decoder's with padding, BOS and EOS."""
    if tokenizer.pad_token is None:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B </s>",
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
        tokenizer.pad_token = "</s>"
    tokenizer.model_max_length = 60
    return tokenizer


def _family(config, folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    _tokens(wordpiece_tokenizer()).save_pretrained(folder)
    return folder


SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
FAMILIES = {
    "roberta": lambda: transformers.RobertaConfig(
        **SIZES, intermediate_size=48, max_position_embeddings=66, pad_token_id=0
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=200, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64, **IDS
    ),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SIZES,
        **IDS,
        intermediate_size=48,
        max_position_embeddings=64,
        local_attention=8,
        cls_token_id=2,
        sep_token_id=3,
    ),
    "electra": lambda: transformers.ElectraConfig(
        **SIZES, intermediate_size=48, embedding_size=16, max_position_embeddings=64
    ),
}  # fmt: skip
NAMES = ("bert", "mistral", "qwen3", *FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of sentence-transformers of each family."""
    root, made = tmp_path_factory.mktemp("families"), {}
    for name in NAMES:
        if name in FAMILIES:
            bare = _family(FAMILIES[name](), root / f"{name}-bare")
        elif name == "bert":
            bare = save_encoder(root / f"{name}-bare")
            _tokens(wordpiece_tokenizer()).save_pretrained(bare)
        else:
            bare = save_decoder(
                root / f"{name}-bare", name, tokenizer=_tokens(metaspace_tokenizer())
            )
        with torch.random.fork_rng():
            torch.manual_seed(5)
            modules = [Transformer(str(bare)), Pooling(32, "mean"), Dense(32, 24), Normalize()]
        made[name] = root / name
        SentenceTransformer(modules=modules, device="cpu").save(str(made[name]))
    return made


def _put(folder, settings):
    for file, key, value in settings:
        path = folder / file
        values = json.loads(path.read_text())
        if file == POOLING and key == "pooling_mode":
            values = {k: v for k, v in values.items() if not k.startswith("pooling_mode")}
        path.write_text(json.dumps({**values, key: value}))


def _unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _reference(folder):
    """Vectors of queries, of documents and of texts without a role; None where it fails."""
    try:
        model = SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": torch.float32}
        )
        return [
            _unit(embed(TEXTS, batch_size=4))
            for embed in (model.encode_query, model.encode_document, model.encode)
        ]
    except Exception as error:  # noqa: BLE001 - of any kind, whichever setting it was
        return error


def _outcome(folder, settings):
    """`equal` or `refused`; fails where vectors differ, or a refusal names no setting."""
    _put(folder, settings)
    try:
        check_loadable(folder)
        model = load_model(folder, dtype="float32")
        found = {role: encode(model, TEXTS, role=role) for role in ("query", "document")}
    except RayembedError as error:
        if not any(key in str(error) for _, key, _ in settings):
            pytest.fail(f"{settings}: refused without a name: {error}")
        return "refused"
    expected = _reference(folder)
    if isinstance(expected, Exception):
        return f"fails elsewhere: {type(expected).__name__}"
    assert saved_widths(folder)[0] == model.dimensions[0] == expected[0].shape[1], settings
    apart = {
        "query": np.abs(found["query"] - expected[0]).max(),
        "document": np.abs(found["document"] - expected[1]).max(),
    }
    if model.tokenizer.prompt("", "document") in ("", "the text "):
        stated = json.loads((folder / TOP).read_text())
        if stated.get("default_prompt_name") or not model.tokenizer.prompt("", "document"):
            apart["no role"] = np.abs(found["document"] - expected[2]).max()
    assert max(apart.values()) < TOLERANCE, (settings, apart)
    return "equal"


def _copy(folders, family, folder):
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(folders[family], folder)


@pytest.mark.parametrize("family", ["bert", "mistral"])
def test_each_setting_alone_is_applied_or_refused(folders, tmp_path, family):
    """Of the decoder those of the tokenizer and of transformers, which go by the family."""
    seen = {}
    for setting in (*SETTINGS, *OTHERS):
        if family != "bert" and setting[0] not in (TOKENIZER, CONFIG):
            continue
        folder = _copy(folders, family, tmp_path / "one")
        seen[json.dumps(setting)] = _outcome(folder, [setting])
    refused = [key for key in map(json.dumps, SETTINGS) if seen.get(key) == "refused"]
    assert refused == []
    ignored = {setting[1] for setting in OTHERS if seen.get(json.dumps(setting)) == "equal"}
    assert ignored <= {"padding_side", "pad_token_id"}


@pytest.mark.parametrize("seed", range(40))
def test_drawn_settings_are_applied_or_refused(folders, tmp_path, seed):
    draw = random.Random(seed)
    family = draw.choice(NAMES)
    settings = {
        (file, key): value for file, key, value in draw.sample(SETTINGS, k=draw.randint(1, 6))
    }
    for file, key, value in draw.sample(OTHERS, k=draw.choice([0, 0, 0, 1])):
        settings[file, key] = value
    drawn = [(file, key, value) for (file, key), value in settings.items()]
    print(seed, family, drawn)  # noqa: T201 - the draw of a test that fails
    folder = _copy(folders, family, tmp_path / "one")
    if _outcome(folder, drawn) == "equal" and seed % 4 == 0:
        _check_saved_again(folder, tmp_path / "again")


def _check_saved_again(folder, again):
    model = load_model(folder, dtype="float32")
    model.save(again)
    found = [encode(model, TEXTS, role=role) for role in ("query", "document")]
    loaded = load_model(again, dtype="float32")
    for vectors, theirs, role in zip(found, _reference(again), ("query", "document"), strict=False):
        np.testing.assert_allclose(theirs, vectors, atol=TOLERANCE)
        np.testing.assert_allclose(encode(loaded, TEXTS, role=role), vectors, atol=TOLERANCE)


def test_the_prompt_of_texts_without_a_role_is_that_of_documents(folders, tmp_path):
    prompts = {"query": "Query: ", "document": "the text "}
    for name, outcome in (("document", "equal"), ("query", "refused")):
        drawn = [(TOP, "prompts", prompts), (TOP, "default_prompt_name", name)]
        assert _outcome(_copy(folders, "bert", tmp_path / "one"), drawn) == outcome


@pytest.mark.parametrize("unpadded", ["always", "never"])
def test_a_padding_token_that_a_text_spells_out_has_no_position(folders, unpadded):
    texts = ["a [PAD] fox [PAD] and [PAD] [PAD] the lazy dog", "[PAD]", *TEXTS]
    model = load_model(folders["roberta"], dtype="float32")
    model.unpadded = unpadded
    reference = SentenceTransformer(str(folders["roberta"]), device="cpu").encode(texts)
    found = encode(model, texts, role="document")
    np.testing.assert_allclose(found, _unit(reference), atol=TOLERANCE)


def test_a_cut_model_is_cut_wherever_it_is_used(folders, tmp_path):
    folder = _copy(folders, "bert", tmp_path / "one")
    whole = load_model(folder)
    _put(folder, [(TOP, "truncate_dim", 8)])
    cut = rayembed.load(folder, device="cpu")
    vectors = cut.encode(TEXTS)
    assert vectors.shape == (len(TEXTS), 8)
    expected = _unit(encode(whole, TEXTS, role="document")[:, :8])
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    spec = make_spec(ModelUnderTest(reference=str(folder)), on="cpu")
    of_evaluation = spec.load("cpu")(TEXTS, EncodeSpec("document", ""))
    np.testing.assert_allclose(of_evaluation, expected, atol=TOLERANCE)
    saved = tmp_path / "saved"
    cut.model.save(saved)
    assert json.loads((saved / TOP).read_text())["truncate_dim"] == 8
    assert saved_widths(saved) == (8,)
    for place in (folder, saved):
        registered = _registered(place)
        answer = registered.predict(None, {"input": TEXTS})["data"]
        np.testing.assert_allclose([one["embedding"] for one in answer], expected, atol=TOLERANCE)


def _registered(folder):
    """The model as MLflow serves it."""
    model = OpenAIEmbeddings()
    model.load_context(SimpleNamespace(model_config={}, artifacts={"model": str(folder)}))
    return model


def test_a_registered_model_hands_out_no_numbers_that_are_not_finite(folders):
    model = _registered(folders["bert"])
    with torch.no_grad():
        model.model[0].auto_model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(MlflowException, match="not finite"):
        model.predict(None, {"input": TEXTS})


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (TOP, "truncate_dim", 8),
        (TOP, "prompts", {"query": "Query: "}),
        (TRANSFORMER, "max_seq_length", 9),
        (POOLING, "pooling_mode", "cls"),
        (DENSE, "activation_function", "torch.nn.modules.linear.Identity"),
    ],
)
def test_a_saved_model_whose_files_say_two_things_is_refused(folders, tmp_path, file, key, value):
    load_model(folders["bert"]).save(tmp_path / "saved")
    check_loadable(tmp_path / "saved")
    _put(tmp_path / "saved", [(file, key, value)])
    for load in (check_loadable, load_model):
        with pytest.raises(ArtifactError, match=r"truncate_dim|prompt|max_seq|pooling|projections"):
            load(tmp_path / "saved")


def test_lengths_of_former_files_count_and_positions_limit_them(folders, tmp_path):
    folder = _copy(folders, "roberta", tmp_path / "one")
    (folder / TRANSFORMER).unlink()
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 12}')
    assert _outcome(folder, []) == "equal"
    assert load_model(folder).config.query_max_length == 12
    # Of 66 positions two are no text's, and sentence-transformers fails for longer ones.
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 66}')
    model = load_model(folder)
    assert model.config.query_max_length == 65
    assert np.isfinite(encode(model, ["fox " * 100], role="document")).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries[1].update(name="0"), "two modules with the same name"),
        (lambda entries: entries[1].update(path="../1_Pooling"), "no path inside its folder"),
        (lambda entries: entries[1].update(kwargs=["task"]), "kwargs="),
        (lambda entries: entries.append("Normalize"), "must be a list of modules"),
    ],
)
def test_lists_of_modules_that_are_read_otherwise_are_refused(folders, tmp_path, change, message):
    folder = _copy(folders, "bert", tmp_path / "one")
    entries = json.loads((folder / MODULES).read_text())
    change(entries)
    (folder / MODULES).write_text(json.dumps(entries))
    for load in (check_loadable, load_model):
        with pytest.raises(ArtifactError, match=message):
            load(folder)


def test_adapters_beside_a_model_are_refused(folders, tmp_path):
    folder = _copy(folders, "bert", tmp_path / "one")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ArtifactError, match=r"PEFT adapters.*merge_and_unload"):
        check_loadable(folder)


@pytest.mark.parametrize("special", [False, True])
def test_tokens_without_an_embedding_are_refused_at_load(folders, tmp_path, special):
    folder = _copy(folders, "bert", tmp_path / "one")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = json.loads((folder / CONFIG).read_text())["vocab_size"]
    tokenizer.add_tokens([f"<new{i}>" for i in range(rows - len(tokenizer))])
    tokenizer.add_tokens(["<behind>"], special_tokens=special)
    tokenizer.save_pretrained(folder)
    config = BiEncoderConfig(
        backbone=BackboneConfig(path=str(folder), dtype="float32"),
        projections=(ProjectionConfig(width=24, activation="tanh"),),
        query_max_length=40,
        document_max_length=40,
    )
    for load in (
        check_loadable,
        load_model,
        lambda at: build_model(config, at, seed=0),
        lambda at: check_buildable(config, at),
    ):
        with pytest.raises(
            ArtifactError, match=r"1 tokens whose ids are beyond the model's 200 emb.*behind"
        ):
            load(folder)


def test_placeholders_of_images_without_an_embedding_fail_texts_that_hold_them(folders, tmp_path):
    """As that of EmbeddingGemma, whose tokenizer has one token more than the model embeddings."""
    folder = _copy(folders, "bert", tmp_path / "one")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = json.loads((folder / CONFIG).read_text())["vocab_size"]
    tokenizer.add_tokens([f"<new{i}>" for i in range(rows - len(tokenizer))])
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    check_loadable(folder)
    model = load_model(folder)
    encode(model, TEXTS, role="query")
    with pytest.raises(DataError, match=r"one of the tokens \['<image_soft_token>'\].*no emb"):
        encode(model, ["a fox <image_soft_token>"], role="query")
