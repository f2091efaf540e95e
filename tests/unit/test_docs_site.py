"""The documentation as a site: every page is built, no link is dead, every setting is there."""

import json
import re

import build_site
import draw_rooms
import pytest

from rayembed.config.settings import kind_of
from rayembed.jobs.table import JOBS
from rayembed.losses.infonce import InfoNCE


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build_site.build(folder)
    return folder


def test_the_reference_has_every_command_and_describes_settings(site):
    commands = (site / "pages" / "docs" / "reference" / "commands.md").read_text()
    assert [name for name in JOBS.members() if f"### `rayembed {name}`" not in commands] == []
    losses = (site / "pages" / "docs" / "reference" / "settings" / "losses.md").read_text()
    _, _, own = losses.partition(f"## `{kind_of(InfoNCE)}`")
    for name, field in InfoNCE.model_fields.items():
        if name != "kind":
            assert f"| `{name}` |" in own
            assert " ".join(field.description.split()).replace("|", "\\|") in own


def test_no_setting_of_the_reference_is_without_a_type_and_pages_ask_no_other_host(site):
    for page in (site / "pages" / "docs" / "reference" / "settings").glob("*.md"):
        rows = [line.split(" | ") for line in page.read_text().splitlines() if line[:3] == "| `"]
        assert [row for row in rows if "~" in row[1] or "<class" in row[1]] == []
    html = (site / "html" / "index.html").read_text()
    assert "fonts.googleapis.com" not in html


def test_a_search_finds_guides_and_not_the_log_of_experiments(site):
    items = json.loads((site / "html" / "search.json").read_text())["items"]
    found = {item["location"].partition("#")[0] for item in items}
    assert {"docs/faults.html", "benchmarks/index.html"} <= found
    assert [page for page in found if page.startswith("benchmarks/log/")] == []
    assert (site / "html" / "benchmarks" / "log" / "2026-11-30.html").exists()


def test_a_dead_link_fails_the_build(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "docs").mkdir(parents=True)
    (checkout / "README.md").write_text("# Start\n\nSee [a page](docs/python.md).\n")
    (checkout / "docs" / "python.md").write_text("# A page\n\nSee [another](another.md).\n")
    monkeypatch.setattr(build_site, "ROOT", checkout)
    with pytest.raises(SystemExit, match=r"another\.md"):
        build_site.build(tmp_path / "site")


def test_the_drawing_of_the_rooms_is_that_of_the_code():
    drawn = re.search("<dc:description>(.*)</dc:description>", draw_rooms.DRAWING.read_text())
    assert drawn is not None
    now = draw_rooms.arrows()
    assert drawn[1].replace("&gt;", ">") == now, "run python docs/site/draw_rooms.py"
    assert "pipeline > training" in now
    assert "training > pipeline" not in now
