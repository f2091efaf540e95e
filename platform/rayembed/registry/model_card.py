"""README.md of an exported model, from recorded facts only."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayembed.config.causal2vec import Representation
from rayembed.config.data import DatasetConfig
from rayembed.config.instructions import plain_head
from rayembed.config.model import (
    BiEncoderConfig,
    Causal2VecConfig,
    CDEConfig,
    ModelConfig,
    NomicMoeConfig,
    NVEmbedConfig,
    has_plain_format,
    pretrained_parts,
    without_place,
)
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.registry.card_parts import (
    front_matter,
    registry_address,
    score_section,
    serving_section,
)
from rayembed.registry.scores import TaskScore
from rayembed.tables import Table, show

CARD_FILE = "README.md"
"""File name of the card in the model's folder."""

FOLDER = "path/to/this/folder"
"""Stands in code of the card for the folder that the card lies in."""


def model_card(
    run: Run,
    *,
    dimensions: int,
    scores: str,
    provenance: Mapping[str, Any],
    registered_model: str | None,
    results: Sequence[TaskScore] = (),
    base_licence: str = "",
    data_licences: Mapping[str, str] | None = None,
) -> str:
    """Model card in Markdown with YAML front matter for model hubs.

    Args:
        dimensions: width of the vectors.
        scores: a Markdown table; empty when nothing was scored.
        provenance: what `collect_provenance` gives.
        registered_model: name in MLflow's registry; None: not registered.
        results: of this model, with what they were measured on; hubs show them.
        base_licence: as the base model's home states it; empty: not known.
        data_licences: by the data set's name, as its home states it; others are not known.
    """
    licences = data_licences or {}
    scored = bool(scores.strip() or results)
    reference = FOLDER
    if registered_model is not None:
        reference = registry_address(registered_model, scored=False)
    sections = [
        front_matter(
            run.name,
            base_model=hub_name(run.model.backbone.path),
            licence=base_licence,
            datasets=[name for data in run.data.datasets if (name := _hub_dataset(data))],
            results=results,
        ),
        f"# {run.name}\n\n{_what_it_is(run, dimensions)}",
        "## Use\n\n" + _use(run, registered_model, scored=scored),
        "## Scores\n\n" + score_section(scores, results, reference),
        "## Training\n\n" + _training(run, _row_counts(provenance), licences),
        "## Provenance\n\n" + _provenance(run, provenance),
        "## Limits\n\n" + _limits(run, base_licence, licences),
    ]
    return "\n\n".join(sections) + "\n"


def instruction_template(model: ModelConfig) -> str | None:
    """Template that wraps an instruction before a text; None if it follows the role's prefix as
    plain text.
    """
    match model:
        case BiEncoderConfig():
            return None
        case NomicMoeConfig():
            return "{instruction}"
        case _:
            return model.instruction_template


def hub_name(reference: str) -> str | None:
    """Name `org/name` of a model on the hub; None for models from elsewhere."""
    if not reference.startswith("hf://"):
        return None
    path = reference.removeprefix("hf://").partition("@")[0]
    return "/".join(path.split("/")[:2])


def _hub_dataset(data: DatasetConfig) -> str | None:
    path = data.source.paths.get("path", "")
    if not path.startswith("hf://datasets/"):
        return None
    return "/".join(path.removeprefix("hf://datasets/").partition("@")[0].split("/")[:2])


def _what_it_is(run: Run, dimensions: int) -> str:
    model = run.model
    lora = f"LoRA of rank {model.lora.rank}, merged into the weights" if model.lora else "in full"
    if isinstance(model, Causal2VecConfig) and model.encoder is not None and model.encoder.frozen:
        lora += ", the encoder left as it was"
    lengths = f"{model.query_max_length} tokens of a query"
    lengths += f" and {model.document_max_length} of a document"
    return (
        f"{_kind(model)} that maps a text to a vector of {dimensions} numbers of unit length; the "
        f"similarity of two texts is the cosine. Trained from {_base(model)}, {lora}. It reads "
        f"the first {lengths}."
    )


def _kind(model: ModelConfig) -> str:
    """Description of the architecture."""
    match model:
        case NVEmbedConfig():
            mask = (
                "without its causal mask" if model.mask == "bidirectional" else "with causal mask"
            )
            return (
                f"A decoder LLM {mask} and {_named(model.pooling.kind)} pooling (NV-Embed, arXiv "
                "2405.17428)"
            )
        case BiEncoderConfig():
            return f"A bi-encoder with {_named(model.pooling.kind)} pooling"
        case NomicMoeConfig():
            return _nomic(model)
        case Causal2VecConfig():
            return _causal2vec(model)
        case CDEConfig():
            return (
                f"An encoder that reads a text behind vectors of {model.num_context} documents of "
                "its corpus (contextual document embeddings, arXiv 2410.02525)"
            )


def _causal2vec(model: Causal2VecConfig) -> str:
    if model.encoder is None:
        return f"A {model.mask} LLM whose last token is the embedding"
    return (
        f"A {model.mask} LLM beside a bidirectional encoder (Causal2Vec, arXiv 2507.23386; "
        f"{_CONTEXTUAL[model.representation]})"
    )


def _nomic(model: NomicMoeConfig) -> str:
    if model.experts is None:
        return "A dense encoder with rotary positions and mean pooling"
    return (
        f"An encoder with rotary positions and {model.experts.num_experts} experts, of which a "
        f"token takes {model.experts.top_k}, and mean pooling (Nomic Embed v2, arXiv 2502.07972)"
    )


_CONTEXTUAL: dict[Representation, str] = {
    "concat": "the embedding is the last states of Contextual token and EOS",
    "average": "the embedding is the mean of the last states of Contextual token and EOS",
    "eos": "the embedding is the last state of EOS",
    "concat_encoder": "the embedding is the Contextual token and the last state of EOS",
    "separate": "the embedding is the encoder's mean and the last state of EOS",
}


_CORPUS = 'corpus = ["Foxes eat mice.", "Owls hunt at night."]  # the documents to be searched'


def _named(kind: str) -> str:
    return kind.replace("_", "-")


def _base(model: ModelConfig) -> str:
    """References of the pretrained parts; local paths are reduced to their last part."""
    return " and ".join(
        f"`{without_place(reference)}`" for reference in pretrained_parts(model).values()
    )


def _use(run: Run, registered_model: str | None, *, scored: bool) -> str:
    """Three ways of loading the model, with the run's own instruction if it has one."""
    instruction = next((d.query_instruction for d in run.data.datasets if d.query_instruction), "")
    told, prompt, field = "", "", ""
    default = run.default_instructions().get("query")
    if instruction and not default:
        told = f", instruction={instruction!r}"
        if isinstance(run.model, BiEncoderConfig):
            head = plain_head(run.model.query_prefix, instruction)
        else:
            template = instruction_template(run.model) or ""
            head = template.replace("{instruction}", instruction)
        prompt = f", prompt={head!r}"
        field = f', "instruction": {instruction!r}'
    imported, with_corpus, behind = "encode", "", ""
    if isinstance(run.model, CDEConfig):
        imported = "corpus_context, encode"
        with_corpus = f"{_CORPUS}\nmodel.set_corpus(corpus_context(model, corpus))\n"
        behind = (
            "\n\nQueries and documents of one corpus are embedded in the same context: "
            f"{run.model.num_context} of its documents, drawn by a fixed seed. "
            "`model.save(...)` keeps the context with the model. Vectors of one context cannot be "
            "compared with those of another. Without a corpus the null token stands in its place."
        )
    parts = [
        "With rayembed:\n\n"
        "```python\n"
        "from pathlib import Path\n\n"
        "from rayembed.models.load import load_model\n"
        f"from rayembed.models.encoding import {imported}\n\n"
        f'model = load_model(Path("{FOLDER}"))\n'
        f"{with_corpus}"
        f'queries = encode(model, ["what do foxes eat"], role="query"{told})\n'
        'documents = encode(model, ["Foxes eat mice."], role="document")\n'
        f"```{behind}",
        _with_sentence_transformers(run, prompt),
    ]
    if default:
        parts.append(
            f"It was trained with one instruction before its queries, `{default}`, which stands "
            "before them by itself wherever no other is named."
        )
    if registered_model is not None:
        parts.append(serving_section(registered_model, field, scored=scored))
    return "\n\n".join(parts)


def _with_sentence_transformers(run: Run, prompt: str) -> str:
    """Loading with sentence-transformers; `prompt` is a further argument of `encode_query`."""
    model, folder = run.model, f'"{FOLDER}"'
    module, loader = "sentence_transformers", "SentenceTransformer"
    installed = ""
    cde = isinstance(model, CDEConfig)
    with_corpus = f"{_CORPUS}\nmodel[0].set_corpus(corpus)\n" if cde else ""
    if not has_plain_format(model):
        module, loader = "rayembed.models.sentence_module", "as_sentence_transformer"
        installed = ", where rayembed is installed"
    return (
        f"With sentence-transformers{installed}:\n\n"
        "```python\n"
        f"from {module} import {loader}\n\n"
        f"model = {loader}({folder})\n"
        f"{with_corpus}"
        f'queries = model.encode_query(["what do foxes eat"]{prompt})\n'
        'documents = model.encode_document(["Foxes eat mice."])\n'
        "```"
    )


def _training(run: Run, rows: Mapping[str, int], licences: Mapping[str, str]) -> str:
    """Section on the stages and their training data: kinds, record counts, licences."""
    heads = ["stage", "steps", "pairs a step", "negatives", "in-batch negatives", "data (weight)"]
    stages = Table(heads, [_stage_row(stage) for stage in run.stages])
    data = [
        [
            f"`{dataset.name}`",
            dataset.task,
            f"{rows[dataset.name]:,}" if dataset.name in rows else "unknown",
            licences.get(dataset.name) or "unknown",
            _treatment(dataset),
        ]
        for dataset in run.data.datasets
    ]
    heads = ["data set", "task", "records", "licence", "preparation"]
    return (
        f"{show(stages, 'markdown')}\nRecords are counted as they went into training.\n\n"
        + show(Table(heads, data, align="llrl"), "markdown").rstrip()
    )


def _treatment(data: DatasetConfig) -> str:
    """Short description of a data set's processing."""
    parts = [
        f"at most {data.num_samples:,} records" if data.num_samples else "",
        f"{data.sample_share:.0%} of the records" if data.sample_share else "",
        "filtered for consistency" if data.consistency else "",
        f"hard negatives mined with `{without_place(data.mining.teacher)}`" if data.mining else "",
        "in clusters" if data.clusters else "",
    ]
    return ", ".join(part for part in parts if part) or "–"


def _row_counts(provenance: Mapping[str, Any]) -> dict[str, int]:
    """Final record count of each data set, if known."""
    return {
        name: int(folders[-1]["rows_out"])
        for datasets in (provenance.get("data") or {}).values()
        for name, folders in datasets.items()
        if folders
    }


def _stage_row(stage: StageConfig) -> list[object]:
    data = ", ".join(f"{name} ({weight:g})" for name, weight in stage.datasets.items())
    batch = stage.batch
    in_batch = "yes" if batch.in_batch_negatives else "no"
    return [stage.name, stage.steps, batch.global_pairs, batch.num_negatives, in_batch, data]


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


def _limits(run: Run, base_licence: str, licences: Mapping[str, str]) -> str:
    unknown = [f"`{d.name}`" for d in run.data.datasets if not licences.get(d.name)]
    base = f"is {base_licence}" if base_licence else "is not known"
    data = "those of the training data stand in the table above"
    if unknown:
        data += f", where that of {', '.join(unknown)} is not known"
    return (
        "Scores say what they were measured on and no more; on other data the model may do worse "
        "than its base. It has the biases of its base model and its training data. Longer texts "
        "lose their end. Vectors of other models, and of other versions of this one, cannot be "
        "compared with its own.\n\n"
        f"The licence of the base model ({_base(run.model)}) {base}; {data}. They hold for this "
        "model too."
    )
