"""Assets on the Hugging Face hub: `hf://org/name[/path/inside]@revision`, or
`hf://org/name@revision/path/inside` as the hub's own tools write it.

Files lie in the hub's own cache (`HF_HOME`), which other tools on the machine share. `HF_ENDPOINT`
names a mirror, `HF_TOKEN` opens private repositories, `HF_HUB_OFFLINE=1` uses what is cached.
`upload_model` puts a model's folder there.
"""

import glob
import logging
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from rayembed.assets.atomic import room_for
from rayembed.assets.finite import check_finite_files
from rayembed.assets.hub_client import hub_api, hub_endpoint, limit_hub, unavailable
from rayembed.errors import AssetError, ConfigError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Maximum wait in seconds for the hub to confirm a repository, before anything is downloaded."""

_FORM = "hf://[datasets/]org/name@revision[/path/inside]"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SPECIAL_REVISION = re.compile(r"refs(?:/|%2F)(?:convert|pr)(?:/|%2F)[^/]+")
_MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
_GRAPHS = ("graph.onnx", "graph.xml")
"""Names of exported graphs for CPU runtimes, whose folders have no other weights."""
_GRAPH_FILES = (".onnx", ".data", ".xml", ".bin")
_OTHER_FORMATS = frozenset({"onnx", "openvino", "original", "coreml", "gguf", "runs"})


@dataclass(frozen=True)
class HubReference:
    """A hub repository, or a file or folder inside it, at a revision."""

    repo_type: str
    """Repository type: `model` or `dataset`."""
    repo_id: str
    """Repository name: `org/name`."""
    inside: str
    """Path inside the repository; empty for all of it."""
    revision: str
    """Branch, tag or commit."""


def parse_hub_reference(reference: str) -> HubReference:
    """Parse an `hf://` reference; the default revision is `main`, with a warning.

    Raises:
        AssetError: not of the form.
    """
    body = reference.removeprefix("hf://")
    repo_type = "model"
    if body.startswith("datasets/"):
        repo_type, body = "dataset", body.removeprefix("datasets/")
    body, _, rest = body.partition("@")
    parts = [part for part in body.split("/") if part]
    revision, after = _revision(rest, last=len(parts) > 2)
    inside = [*parts[2:], *after]
    named = len(parts) >= 2 and all(_NAME.fullmatch(part) for part in parts[:2])
    if not named or ".." in inside or "@" in revision or (rest and not revision):
        raise AssetError(f"cannot read the asset reference {reference!r}; expected {_FORM}")
    if not revision:
        logger.warning(
            "the reference %s names no revision, so the branch main is used, whose files may "
            "change",
            reference,
        )
    return HubReference(repo_type, "/".join(parts[:2]), "/".join(inside), revision or "main")


def _revision(rest: str, *, last: bool) -> tuple[str, list[str]]:
    """Split `rest` into a revision and the path after it; with `last`, all of `rest` is the
    revision. A revision may have escapes, `refs%2Fpr%2F1`; in a path they are part of a name.
    """
    special = _SPECIAL_REVISION.match(rest)
    if last and special is None:
        return (unquote(rest), []) if "/" not in rest else ("", [])
    revision = special.group() if special else rest.partition("/")[0]
    return unquote(revision), [part for part in rest[len(revision) :].split("/") if part]


def fetch_from_hub(reference: str, cache: Path | None) -> Path:
    """Download the file or folder of an `hf://` reference, folders with all their files.

    Args:
        reference: as in the module's text.
        cache: the hub's cache folder; None: its default.

    Raises:
        AssetError: not of the form, not there, not allowed or not reachable.
    """
    wanted = parse_hub_reference(reference)
    patterns = None
    if wanted.inside:
        inside = glob.escape(wanted.inside)
        patterns = [inside, f"{inside}/*"]
    path = _snapshot(reference, wanted, patterns, cache) / wanted.inside
    if not path.exists():
        raise AssetError(
            f"{wanted.repo_id!r} at {wanted.revision!r} has no file or folder "
            f"{wanted.inside!r} (asset {reference!r})"
        )
    return path


def fetch_model_from_hub(reference: str, cache: Path | None) -> Path:
    """Download the safetensors, JSON and tokenizer files of a model folder, and no other weight
    format.

    Pickled weights (`.bin`) come only when there are no safetensors.

    Raises:
        AssetError: as `fetch_from_hub`; also no file of a model.
    """
    import httpx
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    wanted = parse_hub_reference(reference)
    try:
        info = hub_api().repo_info(
            wanted.repo_id, revision=wanted.revision, repo_type=wanted.repo_type
        )
        names = [sibling.rfilename for sibling in getattr(info, "siblings", None) or []]
        needed = model_files(names, wanted.inside)
        if not needed:
            raise AssetError(
                f"{reference!r} contains no model (config.json with safetensors files); the "
                f"repository contains {', '.join(sorted(names)[:20]) or 'nothing'}"
            )
        patterns = [glob.escape(name) for name in needed]
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise unavailable(reference, error) from error
    except (OSError, httpx.HTTPError) as error:
        logger.warning(
            "the hub does not answer (%s); looking for %s in the local cache", error, reference
        )
        start = f"{glob.escape(wanted.inside)}/*" if wanted.inside else "*"
        patterns = [f"{start}{ending}" for ending in _MODEL_FILES]
        return _snapshot(reference, wanted, patterns, cache, only_cached=True) / wanted.inside
    return _snapshot(reference, wanted, patterns, cache) / wanted.inside


def look_at_hub(reference: str) -> None:
    """Check, without downloading, that a repository's revision is in the local cache or on
    the hub.

    Raises:
        AssetError: there is none, or no answer within `LOOK_SECONDS`.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = parse_hub_reference(reference)
    name, kind, revision = wanted.repo_id, wanted.repo_type, wanted.revision
    try:
        snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True)
        return
    except (LocalEntryNotFoundError, OSError):
        pass
    try:
        hub_api().repo_info(name, repo_type=kind, revision=revision, timeout=LOOK_SECONDS)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise unavailable(reference, error) from error


def model_files(names: list[str], inside: str = "") -> list[str]:
    """Select the files in the folder `inside` that loading a model needs; empty if they form no
    model.
    """
    prefix = f"{inside}/" if inside else ""
    below = [name for name in names if name.startswith(prefix)]
    kept = [
        name
        for name in below
        if not _OTHER_FORMATS & set(PurePosixPath(name.removeprefix(prefix)).parts[:-1])
    ]
    has_safetensors = any(name.endswith(".safetensors") for name in kept)
    endings: tuple[str, ...] = _MODEL_FILES if has_safetensors else (*_MODEL_FILES, ".bin")
    if any(name.removeprefix(prefix) in _GRAPHS for name in kept):
        endings = (*_MODEL_FILES, *_GRAPH_FILES)
    needed = [name for name in kept if name.endswith(endings)]
    if not any(PurePosixPath(name).name in ("config.json", "modules.json") for name in needed):
        return []
    return sorted(needed)


def _snapshot(
    reference: str,
    wanted: HubReference,
    patterns: list[str] | None,
    cache: Path | None,
    *,
    only_cached: bool = False,
) -> Path:
    import httpx
    from huggingface_hub import constants, snapshot_download

    limit_hub()
    place = cache or constants.HF_HUB_CACHE
    try:
        with room_for(place, "or set HF_HOME to a folder on another disk"):
            folder = snapshot_download(
                wanted.repo_id,
                repo_type=wanted.repo_type,
                revision=wanted.revision,
                cache_dir=cache,
                allow_patterns=patterns,
                # Without the listing the hub's cache must not count other formats as missing.
                ignore_patterns=[f"{n}/*" for n in _OTHER_FORMATS] if only_cached else None,
                endpoint=hub_endpoint(),
                local_files_only=only_cached,
            )
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise unavailable(reference, error) from error
    return Path(str(folder))


_OF_TRAINING = ("made-of.json", ".*")
"""Files in a model's folder that only document the training run."""


def check_repository_name(name: str) -> str:
    """Check and return a repository name `org/name`; raise if the hub would refuse it.

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
            f"{name!r} cannot be the name of a hub repository; expected org/name of letters, "
            "digits, '-', '_' and '.'"
        )
    return name


def upload_model(folder: Path, name: str, card: str) -> str:
    """Upload a model's folder and its card in one commit, and return the repository's
    address.

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
            "selects another hub. Run the same command to try again"
        ) from error
    return str(made)
