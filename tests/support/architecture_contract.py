"""What holds for a model of every architecture: checks of a tiny one, by its settings and parts."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from made_up_records import made_up_records
from sentence_transformers import SentenceTransformer
from tiny_models import LINES

from rayembed.config.backbone import LoraConfig
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.evaluation.prompts import folder_prompts
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.files import read_json
from rayembed.models.loading.load import check_loadable, load_model, saved_widths
from rayembed.models.loading.saved_folder import MODEL_TYPE
from rayembed.models.passes.encoding import corpus_context, encode
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.model_card import model_card
from rayembed.registry.pyfunc_model import OpenAIEmbeddings
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

TEXTS = [*LINES[1:], "Paris"]
TASK = "Given a question"
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.1},
        "steps": 1,
    },
)


def moved(model):
    """The model with other weights wherever it trains, in evaluation mode."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def of_corpus(model):
    """The model with a corpus, if it reads one."""
    if model.uses_context:
        model.set_corpus(corpus_context(model, LINES))
    return model


def vectors(model, role="query", instruction=""):
    """Vectors of a few texts."""
    return encode(model, TEXTS, role=role, instruction=instruction)


def embeds(config, parts):
    """Unit vectors of the stated width, the same whatever stands beside a text."""
    model = of_corpus(moved(build_model(config, parts, seed=1)))
    found = vectors(model)
    assert found.shape == (len(TEXTS), model.dimensions[0])
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    alone = np.concatenate([encode(model, [text], role="query") for text in TEXTS])
    np.testing.assert_allclose(alone, found, atol=1e-5)
    assert np.abs(found @ found.T - np.eye(len(TEXTS))).max() > 1e-3
    meta = check_buildable(config, parts)
    assert meta.dimensions == model.dimensions
    assert {n: p.shape for n, p in meta.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    kinds = {model.backbone_parameter(n) for n, _ in model.named_parameters()}
    assert kinds == ({True, False} if config.has_head else {True})


def adapts(config, parts, folder):
    """Adapters change nothing at first, are all that the parts train, and merge when saved."""
    assert "lora" in type(config).model_fields
    plain = of_corpus(build_model(config, parts, seed=1).eval())
    names = {
        name.rpartition(".")[2]
        for name, module in plain.backbone.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler.")
    }
    lora = LoraConfig(rank=2, alpha=4, dropout=0.0, target_modules=tuple(sorted(names)))
    adapted = config.model_copy(update={"lora": lora})
    assert "backbone" in adapted.adapters
    model = build_model(adapted, parts, seed=1)
    np.testing.assert_allclose(vectors(of_corpus(model.eval())), vectors(plain), atol=1e-5)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    for part in adapted.adapters:
        own = {n for n in trained if part in n.split(".")}
        assert own, part
        assert all("lora_" in n for n in own), part
    expected = vectors(of_corpus(moved(model)))
    assert np.abs(expected - vectors(plain)).max() > 1e-3
    model.save(folder)
    again = load_model(folder)
    assert not again.config.adapters
    assert not any("lora" in name for name, _ in again.named_parameters())
    np.testing.assert_allclose(vectors(again), expected, atol=1e-5)


def comes_back(config, parts, folder):
    """Saved and read by rayembed, sentence-transformers and MLflow: the same vectors."""
    model = of_corpus(moved(build_model(config, parts, seed=1)))
    model.save(folder, instructions={"Questions": TASK})
    query, document = vectors(model, "query", TASK), vectors(model, "document")
    assert np.abs(query - vectors(model, "query")).max() > 1e-4
    assert type(check_loadable(folder)) is type(config)
    assert saved_widths(folder) == model.dimensions
    again = load_model(folder)
    assert type(again) is type(model)
    assert not again.training
    prompt = config.prompt(TASK)
    found = [
        (vectors(again, "query", TASK), query),
        (vectors(again, "document"), document),
    ]
    plain = "rayembed" not in (folder / "modules.json").read_text()
    assert plain == config.has_plain_format
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert (read_json(folder / "config.json")["model_type"] == MODEL_TYPE) != plain
    for loaded in (theirs, as_sentence_transformer(folder, device="cpu")):
        found += [
            (loaded.encode(TEXTS, prompt=prompt), query),
            (loaded.encode(TEXTS, prompt_name="Questions"), query),
            (loaded.encode_document(TEXTS), document),
        ]
    served = OpenAIEmbeddings()
    stated = {"instruction_template": config.template, "dimensions": list(model.dimensions)}
    served.load_context(SimpleNamespace(artifacts={"model": folder}, model_config=stated))
    for fields, expected in (
        ({"role": "query", "instruction": TASK}, query),
        ({"role": "document"}, document),
    ):
        answer = served.predict(None, {"input": TEXTS} | fields)
        found.append((np.array([item["embedding"] for item in answer["data"]]), expected))
    for seen, expected in found:
        np.testing.assert_allclose(seen, expected, atol=1e-5)


def goes_on(config, parts, folder):
    """A further stage starts with the saved parts and head; other parts give other vectors."""
    first = of_corpus(moved(build_model(config, parts, seed=1)))
    first.save(folder)
    again = of_corpus(build_model(config, dict.fromkeys(parts, folder), seed=2).eval())
    np.testing.assert_allclose(vectors(again), vectors(first), atol=1e-5)
    fresh = of_corpus(build_model(config, parts, seed=2).eval())
    assert np.abs(vectors(fresh) - vectors(first)).max() > 1e-3


def gradients(model, budget, *, cache):
    """Gradients of one step."""
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)
    model.zero_grad()
    torch.manual_seed(1)
    device = torch.device("cpu")
    settings = StepSettings(micro_batch_tokens=budget, grad_cache=cache, device=device)
    back = lambda loss, last: loss.backward()  # noqa: E731
    report = run_step(model, EngineModule(model), back, batch, STAGE, settings)
    return report, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def caches(config, parts):
    """GradCache over small micro-batches gives the gradients of one graph."""
    model = build_model(config, parts, seed=1).train()
    _, whole = gradients(model, 10**6, cache=False)
    report, cached = gradients(model, 30, cache=True)
    assert report.micro_batches > 2
    assert whole.keys() == cached.keys()
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-3
    for name, gradient in whole.items():
        torch.testing.assert_close(cached[name], gradient, atol=2e-5, rtol=1e-3, msg=name)


def prompts(config, parts, folder):
    """Settings, tokenizer and saved folder agree on what stands before a text."""
    model = build_model(config, parts, seed=1).eval()
    model.save(folder, instructions={"Questions": TASK})
    stated = folder_prompts(folder, check_loadable(folder))
    for role in ("query", "document"):
        for instruction in ("", TASK):
            expected = config.prompt(instruction, role)
            assert model.tokenizer.prompt(instruction, role) == expected
            assert stated.head(instruction, role) == expected
    assert stated.named["Questions"] == config.prompt(TASK)
    text = LINES[2]
    (told,) = model.tokenizer([text], "query", [TASK])
    (literal,) = model.tokenizer.with_prompts([text], [config.prompt(TASK)], "query")
    assert told["input_ids"].tolist() == literal["input_ids"].tolist()
    assert model.tokenizer.max_lengths == config.max_lengths


def stands_in_the_card(config):
    """The card says what the model is, and its code is Python."""
    run = get_recipe("biencoder").model_copy(update={"model": config})
    card = model_card(
        run, fingerprint="f", dimensions=32, scores="", provenance={}, registered_model="m"
    )
    assert config.description in card
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        ast.parse(block)


def check_all(config, parts, folder: Path):
    """Every check but that of adapters, which not every architecture takes."""
    embeds(config, parts)
    comes_back(config, parts, folder / "saved")
    goes_on(config, parts, folder / "further")
    caches(config, parts)
    prompts(config, parts, folder / "prompts")
    stands_in_the_card(config)
