"""Register an exported model as a version in MLflow, with its description."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from rayembed.assets.finite import check_finite_files
from rayembed.assets.folder_formats import FolderFormat, format_of
from rayembed.config.model import architecture_classes
from rayembed.config.table import COMPANIONS
from rayembed.registry.aliases import version_turn
from rayembed.registry.indexes import index_section
from rayembed.registry.mlflow_run import (
    FINGERPRINT_TAG,
    as_tracking_error,
    find_model_versions,
    open_client,
    quoted,
)
from rayembed.registry.tracking import Tracker

REQUIRED = (
    "cloudpickle",
    "filelock",
    "huggingface_hub",
    "jaxtyping",
    "mlflow",
    "numpy",
    "pandas",
    "peft",
    "psutil",
    "pydantic",
    "safetensors",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "transformers",
    "xxhash",
)
"""Packages that loading and embedding import, whatever the architecture; what these need in turn,
pip finds."""


def pip_requirements(packages: Iterable[str] = ()) -> list[str]:
    """List the packages that the served model needs, pinned to this environment's versions.

    Args:
        packages: further ones, that a folder's format needs.
    """
    names = {*REQUIRED, *_of_other_packages(), *packages}
    # A local build (`2.13.0+cpu`) is on no index.
    return sorted(f"{name}=={version(name).partition('+')[0]}" for name in names)


def format_requirements(folder: Path) -> list[str]:
    """List further packages that read the model's weight format, such as quantised weights."""
    settings = (json.loads(path.read_text("utf-8")) for path in folder.rglob("config.json"))
    methods = {(one.get("quantization_config") or {}).get("quant_method") for one in settings}
    name = "compressed-tensors"
    return [f"{name}=={version(name)}"] if name in methods else []


def _of_other_packages() -> set[str]:
    """Names of installed packages, other than rayembed, that add architectures."""
    members = [(one.__module__, one.architecture) for one in architecture_classes()]
    modules = {name.partition(".")[0] for both in members for name in both}
    modules -= {"rayembed", *COMPANIONS}
    provided = packages_distributions() if modules else {}
    for name in modules - provided.keys():
        _logger.warning(
            "no installed package is known to contain the module %r, so the registered model's "
            "requirements lack it; install it by hand where the model is served",
            name,
        )
    return {package for name in modules & provided.keys() for package in provided[name]}


TASK = "llm/v1/embeddings"
"""MLflow's task name of OpenAI's embeddings schema, stored in the model's metadata."""

WEIGHTS_TAG = "rayembed.weights_fingerprint"
MODEL_ID_TAG = "rayembed.model_id"
"""Tag with the id of a version's logged model, which holds its metrics; MLflow's own SQL store does
not keep it."""

DESCRIPTION_CHARACTERS = 5000
"""Maximum length of a version's description in MLflow's database
(mlflow/store/model_registry/dbmodels/models.py)."""

_CUT = "\n\n… The rest stands in the README.md of the model's folder.\n"

_CODE = Path(__file__).with_name("pyfunc_model.py")

_FOLDER = "model"
"""Subfolder of the exported folder among the artifacts of the MLflow model."""

_logger = logging.getLogger(__name__)


def make_version(
    folder: str | Path,
    name: str,
    *,
    tracker: Tracker,
    weights_fingerprint: str,
    dimensions: Sequence[int],
    instruction_template: str | None,
    global_step: int,
    complete: Callable[[Path], object] = lambda copy: None,
) -> int:
    """Create a version in the registry, or find the version with these weights; return its number.

    Tags of a version that is there are set again. No alias is moved.

    Args:
        folder: what `EmbeddingModel.save` wrote; sentence-transformers loads it.
        dimensions: widths that a caller may ask for, the full one first.
        instruction_template: how an instruction stands before a text; None: as plain text behind
            the prompt of the text's role.
        global_step: the step of the run after which the weights were exported.
        complete: adds to a copy of the folder what a version has and the folder may lack.

    Raises:
        ArtifactError: a weight of it is not finite.
        TrackingError: MLflow is away or refuses; submit the run again and it goes on from here.
    """
    folder = Path(folder)
    check_finite_files(folder)
    client = open_client(tracker.tracking_uri)
    with as_tracking_error(tracker.tracking_uri):
        run_tags = client.get_run(tracker.run_id).data.tags
        tags = {
            FINGERPRINT_TAG: run_tags.get(FINGERPRINT_TAG, ""),
            WEIGHTS_TAG: weights_fingerprint,
        }
        number = find_version(client, name, weights_fingerprint)
        if number is None:
            config = {
                "name": name,
                "dimensions": list(dimensions),
                "instruction_template": instruction_template,
            }
            model_id = _find_logged_model(client, tracker.experiment_id, weights_fingerprint)
            if model_id is None:
                model_id = _log_model(
                    client, tracker, folder, name, config, tags, global_step, complete
                )
            with version_turn(client, name):
                # Another process may have registered the same weights meanwhile.
                number = find_version(client, name, weights_fingerprint)
                if number is None:
                    return _make_version(client, tracker, name, model_id, tags)
        _logger.info("no new version: version %d of %s already has these weights", number, name)
        for key, value in tags.items():
            client.set_model_version_tag(name, str(number), key, value)
        return number


def describe(client: Any, name: str, number: int, card: str) -> None:
    """Store a model card as the version's description, truncated to the database's limit; the
    indexes that the version's tags name follow it.
    """
    text = card
    if card.startswith("---\n"):
        text = card.partition("\n---\n")[2].strip()  # what is there for hubs
    tags = client.get_model_version(name, str(number)).tags
    client.update_model_version(name, str(number), with_section(text, index_section(tags)))


def with_section(text: str, section: str) -> str:
    """Append a section to a version's description, which is truncated to the database's limit."""
    limit = DESCRIPTION_CHARACTERS - len(section)
    if len(text) > limit:
        text = text[: limit - len(_CUT)].rpartition("\n")[0] + _CUT
    return text + section


def find_version(client: Any, name: str, weights_fingerprint: str) -> int | None:
    """Find the number of the version with these weights; None if there is none."""
    found = find_model_versions(client, name)
    numbers = [int(v.version) for v in found if v.tags.get(WEIGHTS_TAG) == weights_fingerprint]
    return max(numbers, default=None)


def _find_logged_model(client: Any, experiment_id: str, weights_fingerprint: str) -> str | None:
    """Find a completely uploaded model with these weights that a killed process left
    unregistered.
    """
    models = client.search_logged_models(
        [experiment_id], filter_string=f"tags.`{WEIGHTS_TAG}` = {quoted(weights_fingerprint)}"
    )
    return next((str(m.model_id) for m in models if str(m.status) == "READY"), None)


def _log_model(
    client: Any,
    tracker: Tracker,
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    tags: Mapping[str, str],
    global_step: int,
    complete: Callable[[Path], object],
) -> str:
    """Upload a new model with its folder and code to MLflow, and return its id.

    Through the client and not through `mlflow.pyfunc.log_model`, which works on the process's
    global tracking address and active run, and ends that run.
    """
    from mlflow.entities import LoggedModelOutput

    model = client.create_logged_model(
        tracker.experiment_id,
        name=name,
        source_run_id=tracker.run_id,
        tags=dict(tags),
        model_type="embeddings",
    )
    client.log_outputs(tracker.run_id, [LoggedModelOutput(model.model_id, global_step)])
    # Beside the model, where there is room for a second copy of it.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".mlflow-") as scratch:
        copy = _save_pyfunc(Path(scratch) / "model", folder, model, tracker.run_id, config)
        complete(copy)
        client.log_model_artifacts(model.model_id, str(Path(scratch) / "model"))
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def _code(own: FolderFormat | None) -> list[str]:
    """List the folders of code that are stored with a model: this package, and the extra that loads
    its format.
    """
    package = Path(__file__).parents[1]
    top = "" if own is None else own.load.__module__.partition(".")[0]
    return [str(package), *([str(package.with_name(top))] if top in COMPANIONS else [])]


def _save_pyfunc(
    path: Path, folder: Path, logged: Any, run_id: str, config: Mapping[str, Any]
) -> Path:
    """Write an MLflow model folder without local paths; return the path of the model's copy inside
    it.
    """
    import mlflow.pyfunc
    from mlflow.models import Model

    own = format_of(folder)
    packages = () if own is None else own.packages(folder)
    metadata = {"task": TASK}
    described = Model(
        artifact_path=_FOLDER,
        run_id=run_id,
        model_uuid=logged.model_id,
        model_id=logged.model_id,
        metadata=metadata,
    )
    mlflow.pyfunc.save_model(
        path,
        mlflow_model=described,
        python_model=str(_CODE),
        artifacts={_FOLDER: str(folder.absolute())},
        signature=_signature(),
        input_example={"input": ["What is a whale?", "Whales are mammals that live in the sea."]},
        pip_requirements=[*pip_requirements(packages), *format_requirements(folder)],
        code_paths=_code(own),
        model_config=dict(config),
        metadata=metadata,
        # Else MLflow takes uv's files of the working directory along, somebody's project that has
        # nothing to do with the model, and builds the environment from them.
        uv_project_path=path.parent,
    )
    # MLflow writes down where both were taken from. To load them it needs of the code the name
    # alone and of the artifact the path within the model's folder.
    function = described.flavors[mlflow.pyfunc.FLAVOR_NAME]
    function["model_code_path"] = _CODE.name
    artifact = function["artifacts"][_FOLDER]
    artifact["uri"] = artifact["path"]
    described.save(path / "MLmodel")
    return path / str(artifact["path"])


def _signature() -> Any:
    """MLflow signature for OpenAI's embeddings request and response, with role and instruction."""
    from mlflow.models import ModelSignature
    from mlflow.types.llm import EMBEDDING_MODEL_OUTPUT_SCHEMA
    from mlflow.types.schema import AnyType, ColSpec, Schema

    optional = {
        "model": "string",
        "role": "string",
        "instruction": "string",
        "dimensions": "long",
        "encoding_format": "string",
        "user": "string",
    }
    # A text or a list of texts: no narrower type of MLflow's takes both.
    inputs = [ColSpec(AnyType(), "input", required=True)]
    inputs += [ColSpec(kind, name, required=False) for name, kind in optional.items()]
    return ModelSignature(
        Schema(inputs),
        Schema([*EMBEDDING_MODEL_OUTPUT_SCHEMA.inputs, ColSpec("string", "model")]),
    )


def _make_version(
    client: Any, tracker: Tracker, name: str, model_id: str, tags: Mapping[str, str]
) -> int:
    """Create a version of the uploaded model, and return its number."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    in_this_process = not tracker.tracking_uri.startswith(("http://", "https://", "databricks"))
    source = f"models:/{model_id}"
    if in_this_process:
        # A store without a server resolves `models:/` in the process's global tracking address.
        source = client.get_logged_model(model_id).artifact_location
    made = client.create_model_version(
        name, source, tracker.run_id, tags={**tags, MODEL_ID_TAG: model_id}, model_id=model_id
    )
    if in_this_process:
        # What a server does on its own: MLflow's pages show the versions of a model by this tag.
        versions = json.dumps([{"name": name, "version": int(made.version)}])
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": versions})
    return int(made.version)
