"""Write the README.md of an exported model, from recorded facts only."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rayembed.config.data import DatasetConfig
from rayembed.config.model import ModelConfig, without_place
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.config.types import Role
from rayembed.display.tables import Table, show
from rayembed.registry.card_parts import (
    FOLDER,
    front_matter,
    proof_section,
    registry_address,
    score_section,
    serving_section,
)
from rayembed.results.scores import TaskScore

CARD_FILE = "README.md"
"""File name of the card in the model's folder."""


def model_card(
    run: Run,
    *,
    fingerprint: str,
    dimensions: int,
    scores: str,
    provenance: Mapping[str, Any],
    registered_model: str | None,
    share: float = 1.0,
    results: Sequence[TaskScore] = (),
    base_licence: str = "",
    data_licences: Mapping[str, str] | None = None,
    proved: bool = True,
) -> str:
    """Write a model card in Markdown, with YAML front matter for model hubs.

    Args:
        fingerprint: of the run as it was trained; that of a published `run.yaml` is another one.
        dimensions: width of the vectors.
        scores: a Markdown table; empty when nothing was scored.
        provenance: what `collect_provenance` gives.
        registered_model: name in MLflow's registry; None: not registered.
        share: of the trained model in this one: 1 is the trained model, 0 the start, what lies
            between a mixture of both.
        results: of this model, with what they were measured on; hubs show them.
        base_licence: as the base model's home states it; empty: not known.
        data_licences: by the data set's name, as its home states it; others are not known.
        proved: whether the folder has reference vectors (proof).
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
            datasets=[n for data in run.data.datasets if share and (n := hub_dataset(data))],
            results=results,
        ),
        f"# {run.name}\n\n{_what_it_is(run, dimensions, share)}",
        "## Use\n\n" + _use(run, registered_model, share, scored=scored),
        "## Scores\n\n" + score_section(scores, results, reference),
        "## Training\n\n" + _not_whole(share) + _training(run, _row_counts(provenance), licences),
        "## Provenance\n\n" + _provenance(run, fingerprint, provenance),
        *(["## Check of a copy\n\n" + _check_of_a_copy(run, registered_model)] if proved else []),
        "## Limits\n\n" + _limits(run, base_licence, licences),
    ]
    return "\n\n".join(sections) + "\n"


def _check_of_a_copy(run: Run, registered_model: str | None) -> str:
    model = run.model
    return proof_section(
        registered_model or run.name, plain=model.has_plain_format, max_lengths=model.max_lengths
    )


def hub_name(reference: str) -> str | None:
    """Name `org/name` of a model on the hub; None for other references."""
    if not reference.startswith("hf://"):
        return None
    path = reference.removeprefix("hf://").partition("@")[0]
    return "/".join(path.split("/")[:2])


def hub_dataset(data: DatasetConfig) -> str | None:
    """Name `org/name` of a data set on the hub; None for data from elsewhere."""
    path = data.source.paths.get("path", "")
    if not path.startswith("hf://datasets/"):
        return None
    return "/".join(path.removeprefix("hf://datasets/").partition("@")[0].split("/")[:2])


def _what_it_is(run: Run, dimensions: int, share: float) -> str:
    model = run.model
    adapters = model.adapters.get("backbone")
    how = "in full"
    if adapters is not None:
        how = f"LoRA of rank {adapters.config.rank}, merged into the weights"
    how += "".join(f", the {part} left as it was" for part in sorted(model.frozen))
    lengths = f"{model.query_max_length} tokens of a query"
    lengths += f" and {model.document_max_length} of a document"
    origin = f"Trained from {_base(model)}, {how}"
    if share == 0:
        origin = f"Not trained: it is {_base(model)}, which the run began with and kept"
    elif share < 1:
        origin = (
            f"A mixture of weights: {share:.0%} of a model trained from {_base(model)}, {how}, and "
            f"{1 - share:.0%} of what it was trained from"
        )
    return (
        f"{model.description} that maps a text to a vector of {dimensions} numbers of unit length; "
        f"the similarity of two texts is the cosine. {origin}. It reads "
        f"the first {lengths}."
    )


def _not_whole(share: float) -> str:
    """Sentence on how the described training relates to the kept model, if that is the untrained
    one or a mixture.
    """
    if share == 0:
        return (
            "These stages trained a model that was not kept, as it was no better beyond chance; "
            "nothing of it is in these weights.\n\n"
        )
    return "" if share == 1 else f"These stages trained the {share:.0%} of the mixture.\n\n"


_CORPUS = 'corpus = ["Foxes eat mice.", "Owls hunt at night."]  # the documents to be searched'


def _base(model: ModelConfig) -> str:
    """List references of the pretrained parts, with local paths reduced to their last part."""
    return " and ".join(f"`{without_place(reference)}`" for reference in model.parts.values())


def _use(run: Run, registered_model: str | None, share: float, *, scored: bool) -> str:
    """Section with three ways of loading the model, using the run's own instruction if it
    has one.
    """
    instruction = next((d.query_instruction for d in run.data.datasets if d.query_instruction), "")
    told, prompt, field = "", "", ""
    default = run.default_instructions().get("query")
    if instruction and not default:
        told = f", instruction={instruction!r}"
        prompt = f", prompt={run.model.prompt(instruction)!r}"
        field = f', "instruction": {instruction!r}'
    imported, with_corpus, behind = "encode", "", ""
    if run.model.context_places:
        imported = "corpus_context, encode"
        with_corpus = f"{_CORPUS}\nmodel.set_corpus(corpus_context(model, corpus))\n"
        behind = (
            "\n\nQueries and documents of one corpus are embedded in the same context: "
            f"{run.model.context_places} of its documents, drawn by a fixed seed. "
            "`model.save(...)` keeps the context with the model. Vectors of one context cannot be "
            "compared with those of another. Without a corpus the null token stands in its place."
        )
    parts = [
        "With rayembed:\n\n"
        "```python\n"
        "from pathlib import Path\n\n"
        "from rayembed.models.loading.load import load_model\n"
        f"from rayembed.models.passes.encoding import {imported}\n\n"
        f'model = load_model(Path("{FOLDER}"))\n'
        f"{with_corpus}"
        f'queries = encode(model, ["what do foxes eat"], role="query"{told})\n'
        'documents = encode(model, ["Foxes eat mice."], role="document")\n'
        f"```{behind}",
        _with_sentence_transformers(run, prompt),
    ]
    if default:
        parts.append(
            f"{'It was' if share else 'The run'} trained with one instruction before its "
            f"queries, `{default}`, which stands before them by itself wherever no other is named."
        )
    elif run.query_choices:
        choices = "".join(f"\n- `{n}`: `{text}`" for n, text in run.query_choices.items())
        parts.append(
            f"{'It was' if share else 'The run'} trained with different instructions before "
            "its queries, so that none stands before them by default. Name the one that fits: in "
            "sentence-transformers by `encode_query(texts, prompt_name=…)`, in rayembed by "
            "`instruction=…`.\n" + choices
        )
    parts.append(_elsewhere(run))
    if registered_model is not None:
        parts.append(serving_section(registered_model, field, scored=scored))
    return "\n\n".join(parts)


def _elsewhere(run: Run) -> str:
    """Section on other libraries that load the model: which settings they need, and how their
    results differ.
    """
    default = run.default_instructions()
    roles: tuple[Role, ...] = get_args(Role)
    prompts = {role: run.model.prompt(default.get(role, ""), role) for role in roles}
    told = (
        "LangChain's `HuggingFaceEmbeddings` loads the same folder with "
        '`encode_kwargs={"prompt_name": "document"}` and '
        '`query_encode_kwargs={"prompt_name": "query"}`, LlamaIndex\' `HuggingFaceEmbedding` with '
        f"`query_instruction={prompts['query']!r}` and `text_instruction={prompts['document']!r}`. "
        "Without these they put nothing before a text."
    )
    if not run.model.has_plain_format:
        return f"{told} Both need `import rayembed.models.sentence_module` before."
    told += " sentence-transformers computes in float32, which every CPU does fast, "
    told += 'unless it is given `model_kwargs={"dtype": "bfloat16"}`.'
    lengths = run.model.max_lengths
    if len(set(lengths.values())) > 1:
        told += (
            f" It reads {max(lengths.values())} tokens of queries and documents alike; rayembed "
            f"reads {lengths['query']} and {lengths['document']}, as in training. Vectors of texts "
            "that are shorter than both are the same."
        )
    return told


def _with_sentence_transformers(run: Run, prompt: str) -> str:
    """Example code for sentence-transformers; `prompt` is added to the arguments of
    `encode_query`.
    """
    model, folder = run.model, f'"{FOLDER}"'
    module, loader = "sentence_transformers", "SentenceTransformer"
    installed = ""
    with_corpus = f"{_CORPUS}\nmodel[0].set_corpus(corpus)\n" if model.context_places else ""
    if not model.has_plain_format:
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
    """Section on the training stages and their data: loss, kinds, record counts, licences."""
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
        f"{show(stages, 'markdown')}{_of_teachers(run)}\n"
        "Records are counted as they went into training.\n\n"
        + show(Table(heads, data, align="llrl"), "markdown").rstrip()
    )


def _treatment(data: DatasetConfig) -> str:
    """Describe briefly how a data set was processed."""
    parts = [
        f"at most {data.num_samples:,} records" if data.num_samples else "",
        f"{data.sample_share:.0%} of the records" if data.sample_share else "",
        *(step.treatment(without_place) for step in data.steps),
    ]
    return ", ".join(part for part in parts if part) or "–"


def _of_teachers(run: Run) -> str:
    """Write a line for each stage that uses teacher vectors or learns a teacher's hidden states."""
    vectors = "".join(
        f"\nStage {stage.name} reads vectors of "
        f"{', '.join(f'`{without_place(one.teacher)}`' for one in stage.teachers)} "
        f"(loss `{stage.loss.kind}`).\n"
        for stage in run.stages
        if stage.teachers
    )
    states = "".join(
        f"\nStage {stage.name} learns hidden states of "
        f"`{without_place(stage.hidden_states.teacher)}`.\n"
        for stage in run.stages
        if stage.hidden_states is not None
    )
    return vectors + states


def _row_counts(provenance: Mapping[str, Any]) -> dict[str, int]:
    """Number of records of each data set after all data steps, where known."""
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


def _provenance(run: Run, fingerprint: str, provenance: Mapping[str, Any]) -> str:
    code = provenance.get("code") or {}
    commit = code.get("commit") or "unknown"
    if code.get("uncommitted_changes"):
        commit += ", with uncommitted changes"
    packages = provenance.get("packages") or {}
    hardware = provenance.get("hardware") or {}
    constraints = provenance.get("constraints") or {}
    lines = [
        f"- run `{run.name}`, fingerprint `{fingerprint}`, seed {run.seed}",
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
