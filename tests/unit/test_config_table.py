"""Tables of alternatives: members of this package and of others."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from rayembed.config import table
from rayembed.config.settings import Settings, kind_of, members
from rayembed.config.table import SettingsTable, entry_points


class Fruit(Settings):
    """Base of the members of this test."""


class Apple(Fruit):
    """A member."""

    kind: Literal["apple"] = "apple"
    weight: float = 0.2


class Pear(Fruit):
    """Another one."""

    kind: Literal["pear"] = "pear"
    ripe: bool = True


class Stone(Settings):
    """No member: it derives from another class."""

    kind: Literal["stone"] = "stone"


HERE = __name__


def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, points: str, name: str = "orchard"
) -> None:
    """Make a distribution with these entry points of the group `test.fruit` visible."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[test.fruit]\n{points}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_table_of_several_members_is_a_union_that_their_kind_decides() -> None:
    table = SettingsTable("test.none", Fruit, (f"{HERE}:Apple", f"{HERE}:Pear"))
    assert table.classes() == {"apple": Apple, "pear": Pear}
    assert [kind_of(member) for member in members(table.union())] == ["apple", "pear"]
    found = TypeAdapter(table.union()).validate_python({"kind": "pear", "ripe": False})
    assert found == Pear(ripe=False)


def test_a_table_of_one_member_is_that_class() -> None:
    assert SettingsTable("test.none", Fruit, (f"{HERE}:Apple",)).union() is Apple


def test_another_package_adds_a_member_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, f"pear = {HERE}:Pear")
    assert SettingsTable("test.fruit", Fruit, (f"{HERE}:Apple",)).classes() == {
        "apple": Apple,
        "pear": Pear,
    }


@pytest.mark.parametrize("module", ["rayembed.no_such.plum", "no_such_package.plum"])
def test_a_member_that_is_not_installed_is_named_where_it_is_asked_for(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(tmp_path, monkeypatch, f"plum = {module}:Plum", "rayembed")
    table = SettingsTable("test.fruit", Fruit, (f"{HERE}:Apple", f"{HERE}:Pear"))
    adapter = TypeAdapter(table.union())
    assert table.classes() == {"apple": Apple, "pear": Pear}
    assert adapter.validate_python({"kind": "pear"}) == Pear()
    assert "skipping an extension" in caplog.text
    with pytest.raises(ValidationError, match=f"adds 'plum'.*{module}:Plum cannot be imported"):
        adapter.validate_python({"kind": "plum"})


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ("pear = no_such_module:Pear", "package orchard adds 'pear'"),
        (f"pear = {HERE}:Plum", "cannot be imported"),
        (f"plum = {HERE}:Pear", "which has another kind"),
        (f"apple = {HERE}:Apple", "which another member has"),
        (f"stone = {HERE}:Stone", "derives from"),
        (f"here = {HERE}:HERE", "is not a settings class"),
    ],
)
def test_a_wrong_entry_point_is_left_out_and_told_with_its_package(
    points: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed(tmp_path, monkeypatch, points)
    assert SettingsTable("test.fruit", Fruit, (f"{HERE}:Apple",)).classes() == {"apple": Apple}
    (told,) = caplog.messages
    assert words in told
    assert "orchard" in told


def test_tables_cost_no_torch() -> None:
    code = "import rayembed.config.table, sys; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entry_points_of_code_that_comes_later_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a registered model does, which a process loads after another one."""
    monkeypatch.setattr(table, "COMPANIONS", ("comes_later",))
    assert entry_points("a.group") == []
    (tmp_path / "comes_later" / "flat").mkdir(parents=True)
    (tmp_path / "comes_later" / "__init__.py").touch()
    lines = "[a.group]\none = comes_later.flat:ONE\n"
    (tmp_path / "comes_later" / "flat" / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [point.value for point in entry_points("a.group")] == ["comes_later.flat:ONE"]
