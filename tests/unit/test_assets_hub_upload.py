"""A model's folder goes to a hub on loopback, with its card; refusals are in our words."""

import pytest
from upload_hub import TOKEN, upload_hub

from rayembed.assets.hub import check_repository_name, upload_model
from rayembed.errors import AssetError, ConfigError


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "1_Pooling/config.json", "README.md", "made-of.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_the_folder_and_its_card_are_one_commit(folder, monkeypatch):
    with upload_hub(monkeypatch) as seen:
        told = upload_model(folder, "org/name", "# the card")
    assert told.endswith("/org/name")
    assert seen.made["visibility"] == "private"
    assert seen.files == {
        "config.json": b"config.json",
        "1_Pooling/config.json": b"1_Pooling/config.json",
        "README.md": b"# the card",
    }
    assert (folder / "README.md").read_text() == "README.md"


def test_a_refusal_tells_what_to_do_and_no_token(folder, monkeypatch, caplog):
    with upload_hub(monkeypatch, refuses=True), pytest.raises(AssetError) as refused:
        upload_model(folder, "org/name", "")
    assert "HF_TOKEN must allow writing to 'org'" in str(refused.value)
    assert TOKEN not in str(refused.value) + caplog.text


@pytest.mark.parametrize("name", ["name", "org/na me", "org/a/b", "", "org/name.git"])
def test_names_that_the_hub_does_not_take(name):
    with pytest.raises(ConfigError, match="expected org/name"):
        check_repository_name(name)
    assert check_repository_name("org/my-model_1.0") == "org/my-model_1.0"
