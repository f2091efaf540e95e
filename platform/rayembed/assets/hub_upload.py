"""Upload of a model's folder to the Hugging Face hub."""

from pathlib import Path

from rayembed.assets.finite import check_finite_files
from rayembed.assets.hub_client import hub_api
from rayembed.errors import AssetError, ConfigError

_OF_TRAINING = ("made-of.json", ".*")
"""Files of a model's folder that are notes of the run that made it."""


def check_repository_name(name: str) -> str:
    """Return `org/name`; raise unless the hub takes it.

    Raises:
        ConfigError: it is of another form.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
        whole = name.count("/") == 1
    except HFValidationError:
        whole = False
    if not whole:
        raise ConfigError(
            f"{name!r} is no name of a repository on the hub; expected org/name of letters, "
            "digits, '-', '_' and '.'"
        )
    return name


def upload_model(folder: Path, name: str, card: str) -> str:
    """Upload a model's folder with its card in one commit; the address of the repository.

    A repository that is not there is made, as a private one; files of the same name are replaced.
    `HF_TOKEN` or the token of `hf auth login` must allow writing.

    Args:
        name: `org/name`.
        card: becomes README.md.

    Raises:
        AssetError: the hub is away or refuses; nothing of the folder was changed.
        ArtifactError: a weight is not finite.
    """
    import httpx
    from huggingface_hub import CommitOperationAdd

    check_finite_files(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = [path for path in files if not any(path.match(one) for one in _OF_TRAINING)]
    content: dict[str, Path | bytes] = {p.relative_to(folder).as_posix(): p for p in kept}
    content["README.md"] = card.encode()
    api = hub_api()
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.create_commit(
            name,
            [CommitOperationAdd(path, found) for path, found in content.items()],
            commit_message="Model of rayembed",
        )
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise AssetError(
            f"cannot upload {str(folder)!r} to {name!r} on the hub ({type(error).__name__}): "
            f"{said}. HF_TOKEN must allow writing to {name.partition('/')[0]!r}; HF_ENDPOINT "
            "names another hub. The same command tries again"
        ) from error
    return str(made)
