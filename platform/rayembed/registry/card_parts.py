"""Parts that all model cards share: front matter and scores."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from huggingface_hub import EvalResult, ModelCardData

from rayembed.config.types import Role
from rayembed.display.tables import Cell, Table, show
from rayembed.registry.aliases import CANDIDATE
from rayembed.results.scores import (
    MEAN,
    OF_GENERAL,
    OF_OWN,
    TaskScore,
    by_category,
    by_kind,
    mean,
)

_MEANS = {MEAN: "all", OF_OWN: "own data", OF_GENERAL: "general"}

_LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")


def front_matter(
    name: str,
    *,
    base_model: str | None,
    licence: str,
    datasets: Sequence[str],
    results: Sequence[TaskScore],
) -> str:
    """YAML front matter for model hubs, with the scores as `model-index`.

    Args:
        base_model: its name on the hub; None: it has none there.
        licence: of the base, as its home states it; empty: not known.
        datasets: names of training sets on the hub.
    """
    known = _LICENCE_ID.fullmatch(licence)
    data = ModelCardData(
        model_name=name,
        base_model=base_model,
        license=licence if known else ("other" if licence else "unknown"),
        license_name=licence if licence and not known else None,
        datasets=sorted(set(datasets)) or None,
        library_name="sentence-transformers",
        pipeline_tag="feature-extraction",
        tags=["sentence-transformers", "feature-extraction", "sentence-similarity", "rayembed"]
        + (["mteb"] if results else []),
        eval_results=_eval_results(results) or None,
    )
    if data.eval_results is None:
        data.pop("model_name")
    return f"---\n{data.to_yaml()}\n---"


def _eval_results(results: Sequence[TaskScore]) -> list[EvalResult]:
    """Make one evaluation result for each task, in the hub's format; NaN scores are left out. Hubs
    accept numbers only, so NaN scores of a collapsed model are left out.
    """
    return [
        EvalResult(
            task_type=score.category,
            dataset_type=score.dataset or score.task,
            dataset_name=_dataset_name(score),
            dataset_config=_single(part.partition("/")[2] for part in score.parts),
            dataset_split=_single(part.partition("/")[0] for part in score.parts),
            dataset_revision=score.dataset_revision,
            metric_type=score.metric,
            metric_name=score.metric,
            metric_value=round(score.value, 6),
        )
        for score in results
        if math.isfinite(score.value)
    ]


def _dataset_name(score: TaskScore) -> str:
    """Name of a task's data as model hubs show it: with the prefix `MTEB` for mteb's data."""
    return score.task if score.dataset.startswith(("own/", "sample/")) else f"MTEB {score.task}"


def _single(values: Iterable[str]) -> str | None:
    """Return the value if all values are equal; None otherwise."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def score_section(table: str, results: Sequence[TaskScore], reference: str) -> str:
    """Markdown section of scores: the given table or one of all tasks, followed by means of
    categories.

    Args:
        table: of several models, for comparison; empty: none.
        reference: of the model, as jobs take it, for the commands that would score it.
    """
    parts = [table.strip()] if table.strip() else []
    if results and not parts:
        rows = [
            [s.task, s.category, s.metric, Cell(s.value, digits=4), f"`{s.dataset_revision}`"]
            for s in sorted(results, key=lambda score: (score.category, score.task))
        ]
        heads = ["task", "category", "metric", "score", "data revision"]
        parts.append(show(Table(heads, rows, align="lllrl"), "markdown").rstrip())
    if results:
        kinds = {_MEANS[name]: of for name, of in by_kind(results).items()}
        groups = (*by_category(results).items(), *kinds.items())
        rows = [[name, len(of), Cell(mean(of), digits=4)] for name, of in groups]
        heads = ["category", "tasks", "mean"]
        parts.append(show(Table(heads, rows, align="lr"), "markdown").rstrip())
        versions = sorted({score.mteb_version for score in results if score.mteb_version})
        if versions:
            parts.append(f"Measured with mteb {', '.join(versions)}.")
    unscored = f"Not scored. No score of this model is known; {how_to_score(reference)}."
    return "\n\n".join(parts) or unscored


def how_to_score(
    reference: str,
    name: str | None = None,
    *,
    storage: str = "outputs",
    tracking_uri: str | None = None,
) -> str:
    """Text with the two commands that score a model and store the scores with its version.

    Args:
        reference: of the model, as the jobs take it.
        name: of the registered model; None: the reference tells it.
        storage: where results and the registry's own file lie, `outputs` being the jobs' default.
        tracking_uri: MLflow's address, as the run names it; None: the file in the storage.
    """
    named = f" --name {name}" if name else ""
    scored, registered = "", ""
    if storage != "outputs":
        scored += f" --set {shlex.quote(f'placement.storage_path={storage}')}"
        registered += f" --storage-path {shlex.quote(storage)}"
    if tracking_uri is not None:
        scored += f" --set {shlex.quote(f'placement.tracking_uri={tracking_uri}')}"
        registered += f" --tracking-uri {shlex.quote(tracking_uri)}"
    reference = shlex.quote(reference)
    return (
        f"to score it: `rayembed evaluate --model {reference} --benchmark NanoBEIR"
        f"{scored}`, then `rayembed register --model {reference}{named} --results "
        f"{shlex.quote(f'{storage}/evaluation')}{registered}`"
    )


def registry_address(registered_model: str, *, scored: bool) -> str:
    """Address of the registered model as its card states it: by alias, or by version number."""
    return f"models:/{registered_model}" + (f"@{CANDIDATE}" if scored else "/VERSION")


def serving_section(registered_model: str, field: str, *, scored: bool) -> str:
    """Markdown section on loading the model from MLflow's registry and serving it.

    Args:
        field: a further field of the request, with a comma before it; may be empty.
        scored: whether scores of it are known; a model without any has no alias.
    """
    address = registry_address(registered_model, scored=scored)
    number = "" if scored else " VERSION is the number of its version in the registry."
    return (
        "From MLflow's registry, in OpenAI's embeddings schema:\n\n"
        "```python\n"
        "import mlflow\n\n"
        f'model = mlflow.pyfunc.load_model("{address}")\n'
        'model.predict({"input": ["what do foxes eat"], "role": "query"' + field + "})\n"
        "```\n\n"
        "Served at OpenAI's path `/v1/embeddings`: "
        f"`rayembed serve --model {address}`.{number}"
    )


_WITH_SENTENCE_TRANSFORMERS = """from sentence_transformers import SentenceTransformer

folder = Path("{folder}")
model = SentenceTransformer(str(folder), model_kwargs={{"dtype": "float32"}}){lengths}


def embed(text):  # or a request to a server, which has to read text["prompt"] + text["text"]
    encode = model.encode_query if text["role"] == "query" else model.encode_document
    return encode(text["text"], prompt=text["prompt"])
"""
_WITH_HTTP = """
folder, url = Path("{folder}"), "http://localhost:8000/v1/embeddings"


def embed(text):  # of `rayembed serve`, or of any server with OpenAI's schema and these two fields
    own = {{key: text[key] for key in ("role", "instruction") if text[key]}}
    body = json.dumps({{"model": "{name}", "input": text["text"], **own}}).encode()
    with urlopen(Request(url, body, {{"Content-Type": "application/json"}})) as answer:
        return np.array(json.load(answer)["data"][0]["embedding"])
"""
_COMPARED = """
proof = json.loads((folder / "proof" / "proof.json").read_text(encoding="utf-8"))
right = load_file(folder / "proof" / "vectors.safetensors")["right"]
found = np.stack([embed(text) for text in proof["texts"]])
lengths = np.linalg.norm(found, axis=1)
cosines = (found * right).sum(axis=1) / lengths
worst = proof["texts"][int(cosines.argmin())]
print(f"cosine {cosines.min():.5f} ({worst['role']}, {worst['about']})")
print(f"lengths {lengths.min():.3f} to {lengths.max():.3f}")
assert cosines.min() >= {least}
"""
_OF_FLOAT32 = 'proof["tolerance"]["float32" if proof["dtype"] == "float32" else "int8"]'
_OF_ANY_TYPE = 'proof["tolerance"]["int8"]  # a server may compute in bfloat16'
FOLDER = "path/to/this/folder"
"""Stands in code of the card for the folder that the card lies in."""


def proof_section(name: str, *, plain: bool, max_lengths: Mapping[Role, int] | None = None) -> str:
    """Section with code that checks a copy of the model against its stored reference vectors,
    without rayembed.

    Args:
        name: of the model, in requests.
        plain: whether sentence-transformers loads the folder where rayembed is not installed.
        max_lengths: by role, which the plain format does not keep; None: not known.
    """
    different = max_lengths is not None and len(set(max_lengths.values())) > 1
    lengths = ""
    if different and max_lengths is not None:
        lengths = (
            "\nmodel[0].query_length, model[0].document_length = "
            f"{max_lengths['query']}, {max_lengths['document']}"
        )
    own = _WITH_SENTENCE_TRANSFORMERS if plain else _WITH_HTTP
    imported = "" if plain else "from urllib.request import Request, urlopen\n"
    return (
        "The folder `proof` has some 64 texts with the vectors that this model gives, since "
        "servers lose prompts, poolings or lengths unseen. This checks a copy without rayembed; "
        "`rayembed verify` names the mistake, too.\n\n"
        f"```python\nimport json\nfrom pathlib import Path\n{imported}\nimport numpy as np\n"
        "from safetensors.numpy import load_file\n"
        + own.format(folder=FOLDER, lengths=lengths, name=name)
        + _COMPARED.replace("{least}", _OF_FLOAT32 if plain else _OF_ANY_TYPE)
        + "```"
    )


def plain_card(
    name: str,
    *,
    reference: str,
    hub_name: str | None,
    licence: str,
    dimensions: int,
    registered_model: str,
    results: Sequence[TaskScore],
    proved: bool,
) -> str:
    """Model card for another project's model that was registered and scored here.

    Args:
        reference: where it comes from, without paths of somebody's disk.
        hub_name: its name on the hub; None: it has none there.
        proved: whether the folder has reference vectors (proof).
    """
    check = f"## Check of a copy\n\n{proof_section(registered_model, plain=True)}\n\n"
    check = check if proved else ""
    serving = serving_section(registered_model, "", scored=bool(results))
    scores = score_section("", results, registry_address(registered_model, scored=False))
    stated = f"Its home states the licence {licence}." if licence else "Its licence is not known."
    return (
        front_matter(name, base_model=hub_name, licence=licence, datasets=(), results=results)
        + f"\n\n# {name}\n\nAn embedding model that was not trained here, from `{reference}`: it "
        f"maps a text to a vector of {dimensions} numbers. {stated} What it was trained on is told "
        f"by its own home.\n\n## Use\n\n{serving}\n\n"
        f"## Scores\n\n{scores}\n\n"
        f"{check}"
        "## Limits\n\nScores say what they were measured on and no more. Vectors of other models "
        "cannot be compared with its own.\n"
    )
