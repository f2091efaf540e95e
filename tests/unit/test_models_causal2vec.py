"""What must hold of Causal2Vec whatever its weights: masks, padding, both parts, gradients."""

import pickle

import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    DECODERS,
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_decoder,
    save_encoder,
)

from rayembed.config.instructions import instruction_with_examples
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.passes.encoding import encode

TASK = "Given a question, retrieve passages that answer it"
TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris"]
BERT_LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["query", "value", "dense"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    llm = save_decoder(folder / "llm", tokenizer=metaspace_tokenizer(add_bos=True))
    return {"backbone": llm, "encoder": save_encoder(folder / "encoder")}


def config(**settings):
    values = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given", "max_length": 32},
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.0},
        "query_max_length": 96,
        "document_max_length": 96,
    }
    return parse(Causal2VecConfig, values | settings)


def build(folders, **settings):
    return build_model(config(**settings), folders, seed=5).eval()


def tokens_of(model, texts=TEXTS, instruction=TASK):
    return model.tokenizer(texts, "query", [instruction] * len(texts))


@torch.no_grad()
def states_of(model, batch):
    """Hidden states of the LLM's last layer, (B, T, d)."""
    kept = []
    handle = model.backbone.register_forward_hook(
        lambda module, inputs, output: kept.append(output.last_hidden_state)
    )
    model(batch)
    handle.remove()
    return kept[0]


# Masks.


def changed_token(model, *, contextual_fixed):
    """Hidden states of a text and of the same with another token at place 12."""
    tokens = tokens_of(model, [TEXTS[1]])
    other = [{**tokens[0], "input_ids": tokens[0]["input_ids"].copy()}]
    other[0]["input_ids"][12] += 1
    if contextual_fixed:
        tokens = model.first_pass(tokens, 512)
        other = [{**other[0], "encoder_output": tokens[0]["encoder_output"]}]
    else:
        other[0]["encoder_ids"] = other[0]["encoder_ids"].copy()
        other[0]["encoder_ids"][3] += 1
    left, right = (states_of(model, model.tokenizer.collate(t))[0] for t in (tokens, other))
    place = int(tokens[0]["contextual_mask"].argmax())
    assert place < 12
    return (left - right).abs().amax(dim=1), place


def test_with_the_contextual_vector_fixed_no_state_sees_a_later_token(folders):
    model = build(folders)
    difference, _ = changed_token(model, contextual_fixed=True)
    assert (difference[:12] == 0).all()
    assert (difference[12:] > 1e-4).all()
    # The control: through the Contextual token all that stands behind it sees the change.
    difference, place = changed_token(model, contextual_fixed=False)
    assert (difference[:place] == 0).all()
    assert (difference[place:] > 1e-4).all()


def test_the_bidirectional_mask_lets_states_see_later_tokens(folders):
    difference, _ = changed_token(build(folders, mask="bidirectional"), contextual_fixed=True)
    assert (difference > 1e-5).all()


def test_the_contextual_vector_changes_with_every_token_of_the_text(folders):
    model = build(folders)
    (one,) = tokens_of(model, [TEXTS[1]])
    read = model.first_pass([one], 512)[0]["encoder_output"]
    for place in range(1, len(one["encoder_ids"]) - 1):
        ids = one["encoder_ids"].copy()
        ids[place] += 1
        (other,) = model.first_pass([{**one, "encoder_ids": ids}], 512)
        assert np.abs(other["encoder_output"] - read).max() > 1e-4, place
    # Of the instruction it knows nothing.
    (told,) = model.first_pass(tokens_of(model, [TEXTS[1]], "Another one"), 512)
    assert np.array_equal(told["encoder_output"], read)


# Padding.

OTHERS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=128, n_inner=48
    ),
    "opt": transformers.OPTConfig(
        vocab_size=320,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        dropout=0.0,
    ),
}


def save_other(folder, family):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModel.from_config(OTHERS[family]).save_pretrained(folder)
    metaspace_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [*DECODERS, *OTHERS])
def test_padding_changes_nothing_on_either_side_in_any_family(tmp_path, folders, family):
    llm = tmp_path / "llm"
    save_other(llm, family) if family in OTHERS else save_decoder(llm, family)
    lora = None
    model = build({**folders, "backbone": llm}, lora=lora)
    tokens = tokens_of(model)
    with torch.no_grad():
        alone = torch.cat([model(model.tokenizer.collate([t])).embeddings for t in tokens])
        for side in ("right", "left"):
            batch = model.tokenizer.collate(tokens, padding_side=side)
            first_is_padding = bool((batch["attention_mask"][:, 0] == 0).any())
            assert first_is_padding == (side == "left")
            assert (model(batch).embeddings - alone).abs().max() < 1e-5, side
            more = {n: v if "encoder" in n else widened(v, side) for n, v in batch.items()}
            assert (model(more).embeddings - alone).abs().max() < 1e-5, side


def test_without_position_ids_padding_in_front_changes_vectors(tmp_path, folders):
    """The control of the test above, for a family whose positions are learnt."""
    model = build({**folders, "backbone": save_other(tmp_path, "gpt2")}, lora=None)
    tokens, forward = tokens_of(model), model.backbone.forward
    model.backbone.forward = lambda position_ids, **given: forward(**given)
    with torch.no_grad():
        right, left = (
            model(model.tokenizer.collate(tokens, padding_side=side)).embeddings
            for side in ("right", "left")
        )
    assert (right - left).abs().max() > 1e-3


def widened(values, side):
    """The same with seven more columns of padding."""
    pad = (0, 7) if side == "right" else (7, 0)
    return torch.nn.functional.pad(values, pad)


# Tokens.


def names(model, tokens):
    found = model.tokenizer.pretrained.convert_ids_to_tokens(tokens["input_ids"].tolist())
    return ["C" if c else n for n, c in zip(found, tokens["contextual_mask"], strict=True)]


def test_the_sequence_is_bos_template_instruction_contextual_text_template_eos(folders):
    model = build(folders, prompt_start="fox", prompt_end="dog", num_contextual_tokens=2)
    found = names(model, tokens_of(model, ["are cats"])[0])
    assert found[0] == "<s>"
    assert found[-1] == "</s>"
    shown = "".join(found[1:-1]).replace("▁", " ")
    assert shown == f" fox Instruct: {TASK}\nQuery:CC are cats dog"
    bare = names(model, model.tokenizer(["are cats"], "document")[0])
    assert "".join(bare).replace("▁", " ") == "<s> foxCC are cats dog</s>"
    before = build(folders, position="before_instruction")
    shown = "".join(names(before, tokens_of(before, ["are cats"])[0])).replace("▁", " ")
    assert shown == f"<s>C Instruct: {TASK}\nQuery: are cats</s>"


def test_a_text_has_the_same_tokens_with_a_contextual_token_and_without(folders):
    ids = []
    for settings in (
        {},
        {"representation": "separate"},
        {"encoder": None, "representation": "eos"},
    ):
        (one,) = tokens_of(build(folders, **settings), ["are cats"])
        ids.append(one["input_ids"][~one["contextual_mask"]].tolist())
        assert ("encoder_ids" in one) == (settings.get("encoder", True) is not None)
    assert ids[0] == ids[1] == ids[2]


def test_no_bos_where_the_llms_tokenizer_puts_none_and_special_tokens_in_templates(
    tmp_path, folders
):
    save_decoder(tmp_path / "llm", tokenizer=byte_level_tokenizer())
    model = build({**folders, "backbone": tmp_path / "llm"}, prompt_start="<|end|>fox\n")
    found = names(model, tokens_of(model, ["are"])[0])
    assert found[0] == "<|end|>"  # of the template
    assert "".join(found).startswith("<|end|>foxĊInstruct")
    assert found[-1] == "<|end|>"


def test_a_long_text_loses_its_end_alone(folders):
    long = " ".join(TEXTS * 30)
    model = build(folders, prompt_end="dog", query_max_length=60)
    (one,) = tokens_of(model, [long])
    assert len(one["input_ids"]) == 60
    assert names(model, one)[-1] == "</s>"
    assert names(model, one)[-2].endswith("g")
    assert one["contextual_mask"].sum() == 1
    assert len(one["encoder_ids"]) == 32
    tokenizer = model.tokenizer
    taken = tokenizer.num_prompt_tokens(tokenizer.prompt(TASK))
    fits = build(folders, query_max_length=taken + 4)
    assert len(tokens_of(fits, ["are cats"])[0]["input_ids"]) == taken + 4
    with pytest.raises(DataError, match=f"leaves none of query_max_length {taken + 3} for the t"):
        tokens_of(build(folders, query_max_length=taken + 3), ["are"])
    with pytest.raises(ConfigError, match="query_max_length is 3, but special tokens"):
        build(folders, query_max_length=3)


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_texts_are_refused_or_embedded_by_what_stands_around(folders, text):
    model = build(folders)
    with pytest.raises(DataError, match="no tokens of its own"):
        tokens_of(model, [text])
    found = encode(model, [text, *TEXTS], role="document", allow_empty=True)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_the_tokenizer_survives_pickling(folders):
    tokenizer = build(folders).tokenizer
    again = pickle.loads(pickle.dumps(tokenizer))
    for one, two in zip(tokenizer(TEXTS, "query"), again(TEXTS, "query"), strict=True):
        assert {n: v.tolist() for n, v in one.items()} == {n: v.tolist() for n, v in two.items()}


# Two passes for inference.


@pytest.mark.parametrize("num", [1, 4])
def test_encoding_in_two_passes_gives_what_one_pass_gives(folders, num):
    model = build(folders, num_contextual_tokens=num)
    texts = [*TEXTS, *(" ".join(TEXTS[1].split()[i:]) for i in range(1, 8))]
    tokens = model.tokenizer(texts, "query", [TASK] * len(texts))
    with torch.no_grad():
        expected = torch.cat([model(model.tokenizer.collate([t])).embeddings for t in tokens])
    calls = []
    handle = model.encoder.register_forward_hook(lambda *_: calls.append(1))
    found = encode(model, texts, role="query", instruction=TASK, tokens_per_batch=64)
    handle.remove()
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    lengths = sum(len(t["encoder_ids"]) for t in tokens)
    assert len(calls) <= lengths // 32  # its own batches, not those of the LLM's longer sequences


# Gradients.


def gradients(folders, *, checkpointing=False, **settings):
    model = build_model(config(**settings), folders, seed=5).train()
    if checkpointing:
        model.recompute_layers()
    batch = model.tokenizer.collate(tokens_of(model))
    weights = torch.randn(model.dimensions[0], generator=torch.Generator().manual_seed(1))
    (model(batch).embeddings @ weights).sum().backward()
    return model, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def test_a_frozen_encoder_learns_nothing_and_all_else_that_is_trained_does(folders):
    model, found = gradients(folders)
    assert not any(n.startswith("encoder.") for n in found)
    assert {n for n in found if n.startswith("contextual.")} == {
        "contextual.projector.first.weight",
        "contextual.projector.second.weight",
    }
    assert all(g is not None for g in found.values())
    assert found["contextual.projector.first.weight"].abs().max() > 0
    assert {model.backbone_parameter(n) for n in found if "lora_" in n} == {True}
    assert {model.backbone_parameter(n) for n in found if "lora_" not in n} == {False}


@pytest.mark.parametrize("lora", [None, BERT_LORA])
@pytest.mark.parametrize("num", [1, 2])
def test_an_encoder_that_is_not_frozen_gets_gradients_through_the_llm(folders, lora, num):
    encoder = {"path": "given", "max_length": 32, "frozen": False, "lora": lora}
    model, found = gradients(folders, encoder=encoder, num_contextual_tokens=num)
    of_encoder = {n: g for n, g in found.items() if n.startswith("encoder.")}
    assert all(g is not None for g in found.values())
    assert any(g.abs().max() > 0 for g in of_encoder.values())
    assert all(("lora_" in n) == (lora is not None) for n in of_encoder)
    assert not any("pooler" in n for n in of_encoder)
    assert {model.backbone_parameter(n) for n in of_encoder} == {True}
    again = gradients(folders, checkpointing=True, encoder=encoder, num_contextual_tokens=num)[1]
    for name, gradient in found.items():
        assert torch.allclose(gradient, again[name], atol=1e-6), name


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize(
    ("family", "scale"), [("llama", 0.1), ("llama", 10.0), ("gemma2", 1.0), ("gemma3_text", 1.0)]
)
def test_contextual_tokens_begin_as_large_as_words(tmp_path, folders, num, family, scale):
    """Beside LLMs with small and large word embeddings, and such that scale what they look up."""
    save_decoder(tmp_path, family)
    llm = transformers.AutoModel.from_pretrained(tmp_path)
    llm.get_input_embeddings().weight.data.mul_(scale)
    llm.save_pretrained(tmp_path)
    sizes = {}
    for start in ("words", "torch"):
        parts = folders | {"backbone": tmp_path}
        model = build(parts, num_contextual_tokens=num, contextual_start=start)
        batch = model.tokenizer.collate(tokens_of(model))
        with torch.no_grad():
            tokens = model.contextual.projector(model._read_by_encoder(batch))
        embed = model.backbone.get_input_embeddings()
        words = embed(torch.arange(embed.num_embeddings)).detach()
        sizes[start] = float(tokens.pow(2).mean().sqrt() / words.pow(2).mean().sqrt())
    assert 0.5 < sizes["words"] < 2.0
    assert not 0.5 < sizes["torch"] < 2.0


def test_words_that_are_narrower_than_states_are_refused(tmp_path, folders):
    """As in OPT-350m: what is scattered among them would come from other texts' tokens."""
    narrow = transformers.OPTConfig(**{**OTHERS["opt"].to_diff_dict(), "word_embed_proj_dim": 16})
    transformers.AutoModel.from_config(narrow).save_pretrained(tmp_path)
    metaspace_tokenizer().save_pretrained(tmp_path)
    parts = {**folders, "backbone": tmp_path}
    for build_or_check in (check_buildable, lambda c, f: build_model(c, f, seed=0)):
        with pytest.raises(
            ConfigError, match=r"word embeddings are 16 wide and its hidden states 32"
        ):
            build_or_check(config(lora=None), parts)
    alone = {"encoder": None, "representation": "eos", "lora": None}
    check_buildable(config(**alone), {"backbone": tmp_path})


def test_lengths_beyond_learnt_positions_are_refused_for_opt_too(tmp_path, folders):
    save_other(tmp_path, "opt")
    parts = {**folders, "backbone": tmp_path}
    check_buildable(config(lora=None, query_max_length=128), parts)
    with pytest.raises(ConfigError, match=r"query_max_length is 129, .* learnt only 128 positions"):
        check_buildable(config(lora=None, query_max_length=129), parts)


def test_a_shorter_length_holds_for_the_encoder_too(folders):
    model = build(folders, encoder={"path": "given", "max_length": 16})
    tokenizer, text = model.tokenizer, " ".join(TEXTS * 12)
    encoder = tokenizer.encoder

    def read(role):
        (one,) = tokenizer([text], role)
        return len(one["input_ids"]), len(one["encoder_ids"])

    assert read("query") == (96, 16), "what the model was trained with"
    tokenizer.max_lengths = {"query": 12, "document": 96}
    assert read("query") == (12, 12)
    assert read("document") == (96, 16)
    assert encoder.max_lengths == {"query": 16, "document": 16}, "another tokenizer's is left"
    tokenizer.max_lengths = {"query": 200, "document": 96}
    assert read("query")[1] == 16


def test_an_instruction_that_is_too_long_is_refused_before_an_empty_text_too(folders):
    model = build(folders, query_max_length=12, document_max_length=12)
    assert len(model.tokenizer([""], "query", allow_empty=True)[0]["input_ids"]) <= 12
    with pytest.raises(DataError, match="leaves none"):
        model.tokenizer([""], "query", ["find it " * 20], allow_empty=True)


def test_the_contextual_start_changes_nothing_else(folders):
    made = [dict(build(folders, contextual_start=s).named_parameters()) for s in ("words", "torch")]
    other = [name for name in made[0] if not torch.equal(made[0][name], made[1][name])]
    assert other == ["contextual.projector.second.weight"]


def test_the_same_seed_gives_the_same_weights(folders):
    encoder = {"path": "given", "max_length": 32, "frozen": False, "lora": BERT_LORA}
    one, two = (build(folders, encoder=encoder, num_contextual_tokens=4) for _ in range(2))
    assert all(torch.equal(v, two.state_dict()[n]) for n, v in one.state_dict().items())
    other = build_model(config(encoder=encoder, num_contextual_tokens=4), folders, seed=6)
    differ = {n for n, v in one.state_dict().items() if not torch.equal(v, other.state_dict()[n])}
    assert "contextual.reader.queries" in differ
    assert "encoder.encoder.layer.0.attention.self.query.lora_A.default.weight" in differ


# In-context examples.


def test_examples_stand_before_the_instruction_as_the_template_has_it():
    template = "Instruct: {instruction}\nQuery:"
    pairs = [("are cats", "they are"), ("where", "there")]
    told = template.replace("{instruction}", instruction_with_examples(template, "find", pairs))
    assert told == (
        "Instruct: find\nQuery: are cats\nResponse: they are\n\n"
        "Instruct: find\nQuery: where\nResponse: there\n\n"
        "Instruct: find\nQuery:"
    )
    assert instruction_with_examples(template, "find", []) == "find"


def test_examples_keep_to_their_budget_and_are_cut_at_tokens(folders):
    limits = {"max_examples": 3, "query_tokens": 4, "response_tokens": 6, "max_tokens": 90}
    tokenizer = build(folders, examples=limits).tokenizer
    assert tokenizer.max_examples == 3
    assert build(folders).tokenizer.max_examples == 0
    pairs = [(TEXTS[1], TEXTS[0])] * 3
    told = tokenizer.instruct("find", pairs)
    shown = told.count("Response: ")
    assert 1 <= shown < 3
    assert tokenizer.num_prompt_tokens(tokenizer.prompt(told)) <= 90
    assert tokenizer.instruct("find", pairs[:shown]) == told
    query = told.partition("Query: ")[2].partition("\n")[0]
    assert TEXTS[1].startswith(query)
    assert tokenizer.num_prompt_tokens(query) == 4
    (one,) = tokenizer(["are"], "query", [told])
    behind = names(build(folders), one)
    assert behind[behind.index("C") :] == ["C", "▁are", "</s>"]
    assert tokenizer.instruct("find", []) == "find"


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": None}, "representation 'concat' needs an encoder"),
        (
            {"encoder": None, "representation": "eos", "num_contextual_tokens": 2},
            "leave them at 1",
        ),
        ({"representation": "separate", "position": "before_instruction"}, "leave them at 1"),
        ({"instruction_template": "Instruct: "}, "lacks '{instruction}'"),
        ({"encoder": {"path": "x", "lora": BERT_LORA}}, "but encoder.frozen=true forbids that"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_parts_that_do_not_fit_are_refused(folders):
    with pytest.raises(ArtifactError, match="no folder was given for the encoder 'given'"):
        build_model(config(), folders["backbone"], seed=0)
    with pytest.raises(ConfigError, match="whose attention is causal"):
        build({**folders, "encoder": folders["backbone"]})
    long = {"path": "given", "max_length": 65}
    with pytest.raises(ConfigError, match=r"model\.encoder\.max_length is 65, but the encoder has"):
        check_buildable(config(encoder=long), folders)
    wrong = {"path": "given", "frozen": False, "lora": {"target_modules": ["query_proj"]}}
    with pytest.raises(
        ConfigError, match=r"model\.encoder\.lora\.target_modules names 'query_proj'"
    ):
        check_buildable(config(encoder=wrong | {"max_length": 32}), folders)
    with pytest.raises(ConfigError, match="has room for 93 tokens, the query included"):
        check_buildable(config(examples={"max_tokens": 93}), folders)
    fits = check_buildable(config(examples={"max_tokens": 92}), folders)
    assert fits.tokenizer.budget("query") == 96 - 3
