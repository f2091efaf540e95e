"""The README.md of an exported model, made of what is known about it; no number is made up."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rayembed.config.model import BiEncoderConfig, ModelConfig, NVEmbedConfig, plain_head
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig

CARD_FILE = "README.md"
"""Its name in the model's folder."""


def model_card(
    run: Run,
    *,
    dimensions: int,
    scores: str,
    provenance: Mapping[str, Any],
    registered_model: str | None,
) -> str:
    """The card as Markdown with YAML in front, as model hubs read it.

    Args:
        dimensions: width of the vectors.
        scores: a Markdown table; empty when nothing was scored.
        provenance: what `collect_provenance` gives.
        registered_model: name in MLflow's registry; None: not registered.
    """
    sections = [
        _front_matter(run),
        f"# {run.name}\n\n{_what_it_is(run, dimensions)}",
        "## Use\n\n" + _use(run, registered_model),
        "## Scores\n\n" + (scores.strip() or "Not scored."),
        "## Training\n\n" + _training(run),
        "## Provenance\n\n" + _provenance(run, provenance),
        "## Limits\n\n" + _limits(run),
    ]
    return "\n\n".join(sections) + "\n"


def instruction_template(model: ModelConfig) -> str | None:
    """How an instruction stands before a text; None: as plain text behind the role's prefix."""
    return model.instruction_template if isinstance(model, NVEmbedConfig) else None


def _front_matter(run: Run) -> str:
    values: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["sentence-transformers", "feature-extraction", "sentence-similarity", "rayembed"],
    }
    reference = run.model.backbone.path
    if reference.startswith("hf://"):
        # A model hub knows only its own names.
        values["base_model"] = reference.removeprefix("hf://").partition("@")[0]
    return "---\n" + yaml.safe_dump(values, sort_keys=False).strip() + "\n---"


def _what_it_is(run: Run, dimensions: int) -> str:
    model = run.model
    pooling = model.pooling.kind.replace("_", "-")
    if isinstance(model, NVEmbedConfig):
        mask = "without its causal mask" if model.mask == "bidirectional" else "with causal mask"
        kind = f"A decoder LLM {mask} and {pooling} pooling (NV-Embed, arXiv 2405.17428)"
    else:
        kind = f"A bi-encoder with {pooling} pooling"
    lora = f"LoRA of rank {model.lora.rank}, merged into the weights" if model.lora else "in full"
    lengths = f"{model.query_max_length} tokens of a query"
    lengths += f" and {model.document_max_length} of a document"
    return (
        f"{kind} that maps a text to a vector of {dimensions} numbers of unit length; the "
        f"similarity of two texts is the cosine. Trained from {_base(model)}, {lora}. It reads "
        f"the first {lengths}."
    )


def _base(model: ModelConfig) -> str:
    """The backbone's reference; of a path on somebody's disk the last part only."""
    reference = model.backbone.path
    shown = reference if "://" in reference else Path(reference).name
    return f"`{shown}`"


def _use(run: Run, registered_model: str | None) -> str:
    """How to load it in three ways, with the run's own instruction where it has one."""
    instruction = next((d.query_instruction for d in run.data.datasets if d.query_instruction), "")
    told, prompt, field = "", "", ""
    if instruction:
        told = f", instruction={instruction!r}"
        if isinstance(run.model, NVEmbedConfig):
            head = run.model.instruction_template.replace("{instruction}", instruction)
        else:
            head = plain_head(run.model.query_prefix, instruction)
        prompt = f", prompt={head!r}"
        field = f', "instruction": {instruction!r}'
    parts = [
        "With rayembed:\n\n"
        "```python\n"
        "from pathlib import Path\n\n"
        "from rayembed.models.build import load_model\n"
        "from rayembed.models.encoding import encode\n\n"
        'model = load_model(Path("path/to/this/folder"))\n'
        f'queries = encode(model, ["what do foxes eat"], role="query"{told})\n'
        'documents = encode(model, ["Foxes eat mice."], role="document")\n'
        "```",
        _with_sentence_transformers(run, prompt),
    ]
    if registered_model is not None:
        parts.append(
            "From MLflow's registry, in OpenAI's embeddings schema:\n\n"
            "```python\n"
            "import mlflow\n\n"
            f'model = mlflow.pyfunc.load_model("models:/{registered_model}@candidate")\n'
            'model.predict({"input": ["what do foxes eat"], "role": "query"' + field + "})\n"
            "```"
        )
    return "\n\n".join(parts)


def _with_sentence_transformers(run: Run, prompt: str) -> str:
    """How sentence-transformers loads it; `prompt` is a further argument of `encode_query`."""
    model, folder = run.model, '"path/to/this/folder"'
    module, loader = "sentence_transformers", "SentenceTransformer"
    installed, behind = "", ""
    own_format = isinstance(model, BiEncoderConfig) and (
        model.query_max_length == model.document_max_length
    )
    if not own_format:
        module, loader = "rayembed.models.sentence_module", "as_sentence_transformer"
        installed = ", where rayembed is installed"
        behind = (
            f"\n\n`SentenceTransformer({folder}, trust_remote_code=True)` gives the same: "
            "sentence-transformers asks for the flag for every class that is not its own, though "
            "nothing is run that the folder holds."
        )
    return (
        f"With sentence-transformers{installed}:\n\n"
        "```python\n"
        f"from {module} import {loader}\n\n"
        f"model = {loader}({folder})\n"
        f'queries = model.encode_query(["what do foxes eat"]{prompt})\n'
        'documents = model.encode_document(["Foxes eat mice."])\n'
        f"```{behind}"
    )


def _training(run: Run) -> str:
    lines = ["| stage | steps | pairs a step | negatives | in-batch negatives | data (weight) |"]
    lines.append("|---|---|---|---|---|---|")
    lines += [_stage_row(stage) for stage in run.stages]
    rows = [
        f"- `{data.name}`: {data.task}"
        + (f", at most {data.num_samples} records" if data.num_samples else "")
        + (f", {data.sample_share:.0%} of the records" if data.sample_share else "")
        + (f", hard negatives mined with `{data.mining.teacher}`" if data.mining else "")
        for data in run.data.datasets
    ]
    return "\n".join(lines) + "\n\nData sets:\n\n" + "\n".join(rows)


def _stage_row(stage: StageConfig) -> str:
    data = ", ".join(f"{name} ({weight:g})" for name, weight in stage.datasets.items())
    batch = stage.batch
    in_batch = "yes" if batch.in_batch_negatives else "no"
    cells = [stage.name, stage.steps, batch.global_pairs, batch.num_negatives, in_batch, data]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _provenance(run: Run, provenance: Mapping[str, Any]) -> str:
    code = provenance.get("code") or {}
    commit = code.get("commit") or "unknown"
    if code.get("uncommitted_changes"):
        commit += ", with uncommitted changes"
    packages = provenance.get("packages") or {}
    hardware = provenance.get("hardware") or {}
    constraints = provenance.get("constraints") or {}
    lines = [
        f"- run `{run.name}`, fingerprint `{run.fingerprint}`, seed {run.seed}",
        f"- rayembed {code.get('version') or 'unknown'}, commit {commit}",
        f"- Python {provenance.get('python') or 'unknown'}, "
        + (", ".join(f"{name} {found}" for name, found in packages.items()) or "packages unknown"),
    ]
    if constraints:
        lines.append(f"- constraints {constraints['path']}, SHA-256 `{constraints['sha256']}`")
    machine = [f"{hardware['cpu_cores']} cores" if hardware.get("cpu_cores") else ""]
    machine += [str(hardware.get("cpu") or ""), *(hardware.get("gpus") or [])]
    lines.append("- " + (", ".join(part for part in machine if part) or "hardware unknown"))
    lines += [
        f"- data of stage `{stage}`, `{name}`: "
        + " → ".join(f"{f['kind']} `{f['fingerprint']}` ({f['rows_out']:,} rows)" for f in folders)
        for stage, datasets in (provenance.get("data") or {}).items()
        for name, folders in datasets.items()
    ]
    return "\n".join(lines)


def _limits(run: Run) -> str:
    return (
        "Scores say what they were measured on and no more; on other data the model may do worse "
        "than its base. It has the biases of its base model and its training data. Longer texts "
        "lose their end. Vectors of other models, and of other versions of this one, cannot be "
        "compared with its own.\n\n"
        f"The licences of the base model ({_base(run.model)}) and of the training data hold for "
        "this model too; this card does not know them."
    )
