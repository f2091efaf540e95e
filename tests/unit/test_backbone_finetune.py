"""Models with heads, and finetuning against a loop written by hand."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
import transformers
from made_up_benchmarks import CONTEXT, answers, pairs
from tiny_models import save_decoder, save_encoder, save_nomic
from torch.nn import functional

from rayembed.errors import ArtifactError, ConfigError
from rayembed_papers.backbone.catalogue import FINETUNINGS
from rayembed_papers.backbone.finetune import Grid, finetune, predictor
from rayembed_papers.backbone.heads import (
    check_length,
    family_of,
    load_with_head,
    save_with_head,
)
from rayembed_papers.backbone.kinds import work_of
from rayembed_papers.backbone.tokens import BackboneTokenizer

LENGTH = 24
RTE = FINETUNINGS["RTE"]
DENSE = {"moe_every_n_layers": 0, "num_experts": 0, "vocab_size": 200}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("backbones")
    made = {
        "bert": save_encoder(place / "bert"),
        "dense": save_nomic(place / "dense", **DENSE),
        "moe": save_nomic(place / "moe", vocab_size=200),
    }
    settings = transformers.BertConfig.from_pretrained(made["bert"])
    settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = 0.0
    settings.save_pretrained(made["bert"])
    return made


def rows_of(num_rows=8):
    columns = pairs("sentence1", "sentence2", num_rows, 2)
    return list(zip(columns["sentence1"], columns["sentence2"], columns["label"], strict=True))


def inputs_of(folder, one=RTE, rows=None):
    work = work_of(one, BackboneTokenizer(folder, LENGTH))
    return work, work.training_inputs(rows_of() if rows is None else rows)


def loaded(folder, one=RTE, seed=0):
    torch.manual_seed(seed)
    return load_with_head(folder, one, head_dropout=0.0)


@pytest.mark.parametrize("name", ["bert", "dense", "moe"])
def test_finetuning_is_adamw_with_a_falling_rate_as_a_plain_loop_has_it(folders, name):
    """Batches of all rows: the loop need not know in which order the rows come."""
    protocol = RTE.protocol.model_copy(
        update={"epochs": 3, "weight_decay": 0.1, "warmup_share": 0.34, "adam_epsilon": 1e-4}
    )
    grid = Grid(learning_rate=1e-2, batch_size=8, seed=3)
    work, inputs = inputs_of(folders[name])
    model = loaded(folders[name])
    loss = finetune(model, inputs, work.collate, protocol, grid, precision="float32", use_gpu=False)
    plain = loaded(folders[name])
    norms = [m for m in plain.modules() if isinstance(m, torch.nn.LayerNorm)]
    undecayed = {id(p) for m in norms for p in m.parameters()}
    undecayed |= {id(p) for n, p in plain.named_parameters() if n.endswith("bias")}
    groups = [
        {"params": [p for p in plain.parameters() if id(p) not in undecayed], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if id(p) in undecayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-4)
    losses = []
    # Three steps, of which ceil(3 · 0.34) = 2 are warm-up: 0, a half, then all of the rate.
    for share in (0.0, 0.5, 1.0):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * share
        output = plain.train()(**work.collate(inputs))
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        losses.append(output["loss"].item())
    # AdamW's steps of weights whose gradient is nearly zero are sensitive to rounding.
    assert loss == pytest.approx(sum(losses) / 3, abs=1e-5)
    start = loaded(folders[name]).state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, atol=1e-4, rtol=0)
    moved = max(float((start[k] - v).abs().max()) for k, v in plain.state_dict().items())
    assert moved > 5e-3, "fifty times the tolerance"


def test_clipping_and_seeds_change_what_is_learnt(folders):
    work, inputs = inputs_of(folders["bert"])

    def trained(seed=1, **changes):
        protocol = RTE.protocol.model_copy(update={"epochs": 1, **changes})
        model = loaded(folders["bert"])
        grid = Grid(learning_rate=1e-2, batch_size=2, seed=seed)
        finetune(model, inputs, work.collate, protocol, grid, precision="float32", use_gpu=False)
        return model.classifier.weight.detach()

    first = trained()
    assert torch.equal(first, trained())
    assert not torch.equal(first, trained(seed=2))
    assert not torch.equal(first, trained(max_grad_norm=0.01, adam_epsilon=1.0))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["bert", "moe"])
def test_a_small_task_is_learnt_and_then_told(folders, name, precision):
    model = loaded(folders[name])
    work, inputs = inputs_of(folders[name])
    predict = predictor(model, rows=3, precision=precision, device="cpu")
    protocol = RTE.protocol.model_copy(update={"epochs": 60})
    grid = Grid(learning_rate=3e-3, batch_size=4, seed=0)
    finetune(model, inputs, work.collate, protocol, grid, precision=precision, use_gpu=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert work.score(predict, "RTE", {"validation": rows_of()})["validation"]["accuracy"] == 1


def test_outputs_come_in_the_order_of_the_inputs(folders):
    work, inputs = inputs_of(folders["bert"], rows=[*rows_of(5), ("a", "b", 0)])
    model = loaded(folders["bert"]).eval()
    by_one = [model(**work.collate([one]))["logits"][0].detach() for one in inputs]
    found = predictor(model, rows=4, precision="float32", device="cpu")(inputs, work.collate)
    for one, output in zip(by_one, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(output["logits"]), one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_heads_of_a_nomic_bert(folders, name):
    from rayembed.models.nomic_moe.checkpoint import load_encoder_weights

    work, inputs = inputs_of(folders[name])
    batch = work.collate(inputs)
    model = loaded(folders[name]).eval()
    hidden = load_encoder_weights(folders[name])(
        batch["input_ids"], batch["attention_mask"]
    ).last_hidden_state
    first, last = model.head[1], model.head[4]
    logits = torch.tanh(hidden[:, 0] @ first.weight.T + first.bias) @ last.weight.T + last.bias
    output = model(**batch)
    torch.testing.assert_close(output["logits"], logits, atol=1e-6, rtol=1e-5)
    wanted = functional.cross_entropy(logits, batch["labels"])
    torch.testing.assert_close(output["loss"], wanted, atol=1e-6, rtol=1e-5)


KINDS = {
    "STS-B": [("a", "b", 1.5), ("dogs", "cats", 4.0)],
    "COPA": [("the fox", "cause", "dog", "cat", 1), ("a", "effect", "fox", "dogs", 0)],
    "WikiANN": [(["Paris", "there"], [5, 0]), (["fox"], [0])],
    "SQuAD": [("where", CONTEXT, answers(("fox", CONTEXT.index("fox"))))],
    "SQuAD-retrieval": [("where", "the fox"), ("who", "dogs are larger")],
}


@pytest.mark.parametrize("task", KINDS)
def test_the_loss_of_each_kind_is_that_of_transformers(folders, task):
    """A NomicBert's head on the hidden states of a BERT gives what transformers' class gives."""
    one = FINETUNINGS[task]
    for name in ("bert", "moe"):
        work, inputs = inputs_of(folders[name], one, KINDS[task])
        batch = work.collate(inputs)
        model = loaded(folders[name], one).eval()
        output = model(**batch)
        assert output["loss"].shape == ()
        if one.kind == "score":
            wanted = functional.mse_loss(output["logits"][:, 0], batch["labels"])
        elif one.kind == "spans":
            wanted = functional.cross_entropy(output["start_logits"], batch["start_positions"])
            wanted += functional.cross_entropy(output["end_logits"], batch["end_positions"])
            wanted = wanted / 2
        elif one.kind == "retrieval":
            queries = model(batch["query"])["vectors"]
            documents = model(batch["document"])["vectors"]
            assert queries.norm(dim=-1).tolist() == pytest.approx([1, 1], abs=1e-5)
            wanted = functional.cross_entropy(20 * queries @ documents.T, torch.tensor([0, 1]))
        else:
            flat = output["logits"].flatten(0, -2), batch["labels"].flatten()
            wanted = functional.cross_entropy(*flat, ignore_index=-100)
        torch.testing.assert_close(output["loss"], wanted, atol=1e-5, rtol=1e-5)
        if one.kind == "choices":
            assert output["logits"].shape == (2, 2)


@pytest.mark.parametrize("name", ["bert", "moe"])
def test_a_saved_model_starts_another_task_with_its_encoder(folders, name, tmp_path):
    mnli = FINETUNINGS["MNLI"]
    source = loaded(folders[name], mnli, seed=1)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.01)
    save_with_head(source, tmp_path / "mnli")
    target = loaded(tmp_path / "mnli", RTE)
    before, after = source.state_dict(), target.state_dict()
    other = [key for key in after if before[key].shape != after[key].shape]
    assert len(other) == 2, "the last layer, of three classes and of two"
    for key in after.keys() - other:
        assert torch.equal(before[key], after[key]), key
    # The same head where it fits.
    again = loaded(tmp_path / "mnli", mnli).state_dict()
    assert all(torch.equal(before[key], again[key]) for key in again)


def test_encoders_that_are_damaged_or_cannot_read_so_much(folders, tmp_path):
    assert [family_of(folders[n]) for n in folders] == ["transformers", "nomic", "nomic"]
    check_length(folders["moe"], 4096, "SQuAD")
    check_length(folders["bert"], 64, "RTE")
    with pytest.raises(ConfigError, match=r"SQuAD reads 384 tokens .* has only 64 positions; set"):
        check_length(folders["bert"], 384, "SQuAD")
    for name in ("bert", "moe"):
        damaged = tmp_path / name
        damaged.mkdir()
        for file in folders[name].iterdir():
            (damaged / file.name).write_bytes(file.read_bytes())
        weights = safetensors.torch.load_file(damaged / "model.safetensors")
        lost = next(key for key in weights if "layer" in key)
        del weights[lost]
        safetensors.torch.save_file(weights, damaged / "model.safetensors", {"format": "pt"})
        with pytest.raises(ArtifactError, match=r"lacks 1 weights|missing 1"):
            loaded(damaged)


def test_families_without_a_head_of_the_kind(tmp_path):
    folder = save_decoder(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"'llama' have no head for COPA \(AutoModelForMultiple"):
        loaded(folder, FINETUNINGS["COPA"])
    with pytest.raises(ArtifactError, match="padding token"):
        BackboneTokenizer(folder, LENGTH)


def test_labels_of_a_task_decide_the_head(folders):
    assert loaded(folders["bert"], replace(RTE, labels=("a", "b", "c"))).num_labels == 3
