"""Read byte ranges of files without copying them: local, in object storage, or in hub data
sets.

    pypi://…, sample://…                      what is unpacked or made in this machine's cache
    hf://datasets/org/name@revision/path      also @refs/convert/parquet, where the hub keeps a
                                              Parquet copy of data sets that are another format

No code of a data set runs: what is read are its files. `HF_ENDPOINT`, `HF_TOKEN` as in `hub`.
"""

from dataclasses import dataclass
from functools import lru_cache

import pyarrow.fs

from rayembed.assets.hub import HubReference, parse_hub_reference
from rayembed.assets.hub_client import hub_api, hub_endpoint, limit_hub, unavailable
from rayembed.assets.resolver import is_unpacked, resolve
from rayembed.assets.storage import open_storage
from rayembed.errors import AssetError

_HUB = "hf://"


@dataclass(frozen=True)
class HubFile:
    """A file of a hub data set."""

    path: str
    """Reference of this exact content: the revision is a commit."""
    inside: str
    """Path inside the repository."""
    size: int
    """Size in bytes."""
    version: str
    """Content identifier (git blob)."""


def is_on_hub(path: str) -> bool:
    """Whether `path` is a hub reference."""
    return path.startswith(_HUB)


def open_source(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return a filesystem for reading `path`, and the path within it.

    Raises:
        AssetError: a reference to the hub that is not of the form, or of a model.
        PlacementError: an unknown scheme, or a URI that pyarrow cannot read.
    """
    if is_unpacked(path):
        return open_storage(resolve(path))
    if not is_on_hub(path):
        return open_storage(path)
    from huggingface_hub import HfFileSystem

    found = _data_set(path)
    limit_hub()
    hub = HfFileSystem(endpoint=hub_endpoint())
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(hub))
    return filesystem, _whole(found, found.revision, found.inside).removeprefix(_HUB)


def list_hub_files(path: str) -> list[HubFile]:
    """List all files at or below a hub reference, at the current commit of its revision.

    Raises:
        AssetError: not of the form, no such data set or revision, nothing there, not allowed, or
            the hub does not answer.
    """
    import httpx
    from huggingface_hub import RepoFile

    wanted = _data_set(path)
    api = hub_api()
    name, inside = wanted.repo_id, wanted.inside
    try:
        commit = str(api.dataset_info(name, revision=wanted.revision).sha)
        items = []
        if inside:
            items = api.get_paths_info(name, [inside], revision=commit, repo_type="dataset")
        if not any(isinstance(item, RepoFile) for item in items):
            listed = api.list_repo_tree(
                name, inside or None, recursive=True, revision=commit, repo_type="dataset"
            )
            items = list(listed)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise unavailable(path, error) from error
    return [
        HubFile(_whole(wanted, commit, item.path), item.path, item.size, item.blob_id)
        for item in items
        if isinstance(item, RepoFile)
    ]


def reading_errors(path: str) -> tuple[type[Exception], ...]:
    """Return the exception types that reading the file at `path` can raise."""
    if not is_on_hub(path):
        return (OSError, pyarrow.ArrowException)
    import httpx

    return (OSError, pyarrow.ArrowException, httpx.HTTPError)


@lru_cache(maxsize=1024)
def _data_set(path: str) -> HubReference:
    found = parse_hub_reference(path)
    if found.repo_type != "dataset":
        raise AssetError(
            f"{path!r} names a model repository, but rows can only be read from a data set; write "
            f"hf://datasets/{found.repo_id}@{found.revision} for the data set of this name"
        )
    return found


def _whole(found: HubReference, revision: str, inside: str) -> str:
    return f"{_HUB}datasets/{found.repo_id}@{revision}" + (f"/{inside}" if inside else "")
