"""The serving job's arguments; what it serves is tested in test_serving and on Ray."""

import pytest
from tiny_folders import save_biencoder

from rayembed.errors import ArtifactError, AssetError, ConfigError, TrackingError
from rayembed.pipeline.serve_job import pin, run_serve_job


def resolve(arguments):
    return run_serve_job.resolve(arguments)[0]


def test_arguments_and_settings():
    config = resolve(["--model", "models:/m@champion", "--port", "9001"])
    assert (config.model, config.host, config.port) == ("models:/m@champion", "127.0.0.1", 9001)
    config = resolve(["--model", "x", "--set", "limits.texts=7", "--set", "use_gpu=true"])
    assert (config.limits.texts, config.use_gpu, config.port) == (7, True, 8000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "replica=2"], "no setting 'replica'; did you mean 'replicas'?"),
        (["--port", "70000"], "port = 70000"),
        (["--set", "limits.texts=0"], "limits.texts = '0': must be"),
        (["--tracking-uri", "http://user:secret@host"], "tracking_uri"),
    ],
)
def test_wrong_settings_are_told(arguments, message):
    with pytest.raises(ConfigError) as caught:
        resolve(["--model", "x", *arguments])
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_cannot_be_served_is_told_before_ray_starts(tmp_path, capsys):
    for reference, error in [
        ("/nothing/there", AssetError),
        (str(tmp_path), AssetError),
        ("models:/m", ConfigError),
        ("models:/m@champion", TrackingError),
    ]:
        with pytest.raises(error):
            pin(resolve(["--model", reference, "--set", f"storage_path={tmp_path / 'none'}"]))
    folder = save_biencoder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtifactError):
        pin(resolve(["--model", str(folder)]))
    assert run_serve_job(["--model", "/nothing/there"], about=None) == 1
    assert "error: there is no file or folder '/nothing/there'" in capsys.readouterr().err


def test_a_folder_is_served_under_its_name(tmp_path):
    folder = save_biencoder(tmp_path / "my-model")
    config, name, tracking_uri = pin(resolve(["--model", str(folder)]))
    assert (config.model, name, tracking_uri) == (str(folder), "my-model", None)
    assert pin(resolve(["--model", str(folder), "--name", "other"]))[1] == "other"
