"""The serving job's arguments; what it serves is tested in test_serving and on Ray."""

import logging
import os
import signal
import threading
import time

import pytest
from tiny_folders import save_biencoder

from rayembed.config.types import SHORT_NAMES
from rayembed.display.progress import doing
from rayembed.errors import ArtifactError, AssetError, ConfigError, TrackingError
from rayembed.pipeline.run import on_ray as ray_of_jobs
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.job import pin, run_serve_job
from rayembed_extras.serving.settings import named_reference


def resolve(arguments):
    return run_serve_job.resolve(arguments)[0]


def test_arguments_and_settings():
    config = resolve(["--model", "models:/m@champion", "--port", "9001"])
    assert (config.host, config.port) == ("127.0.0.1", 9001)
    assert [(m.name, m.model) for m in config.models] == [("m", "models:/m@champion")]
    config = resolve(
        [
            *("--model", "x", "--set", "limits.texts=7", "--set", "models.0.use_gpu=true"),
            *("--model", "large=hf://org/y@main", "--set", "models.large.replicas=2"),
        ]
    )
    assert (config.limits.texts, config.port) == (7, 8000)
    assert [(m.name, m.model, m.use_gpu, m.replicas) for m in config.models] == [
        ("x", "x", True, 1),
        ("large", "hf://org/y@main", "auto", 2),
    ]


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        ("models:/m@champion", "m", "models:/m@champion"),
        ("models:/my model/3", "my model", "models:/my model/3"),
        ("small=models:/m/3", "small", "models:/m/3"),
        ("hf://org/name@main", "name", "hf://org/name@main"),
        ("/a=b/c/", "c", "/a=b/c/"),
        ("pypi://p==1/a/model?sha256=0", "model", "pypi://p==1/a/model?sha256=0"),
    ],
)
def test_names_of_models(text, name, model):
    assert named_reference(text) == {"name": name, "model": model}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "models.0.replica=2"], "did you mean 'replicas'?"),
        (["--set", "models.y.replicas=2"], "no element 'models.y'; allowed: x"),
        (["--model", "x=y"], "two models have the name 'x'"),
        (["--port", "70000"], "port = 70000"),
        (["--set", "limits.texts=0"], "limits.texts = '0': must be"),
        (["--tracking-uri", "http://user:secret@host"], "--tracking-uri: the address"),
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
    config = pin(resolve(["--model", str(folder), "--model", f"other={folder}"]))
    assert [(m.name, m.model) for m in config.models] == [
        ("my-model", str(folder)),
        ("other", str(folder)),
    ]
    assert config.tracking_uri is None


def test_a_server_that_waits_for_requests_is_told_of_once(tmp_path, monkeypatch, caplog, capsys):
    """Its start is a long task; what follows is none, whatever it lasts."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    quick = {**doing.__wrapped__.__kwdefaults__, "silence_seconds": 0.02}
    monkeypatch.setattr(doing.__wrapped__, "__kwdefaults__", quick)
    caplog.set_level(logging.INFO, logger="rayembed")

    def stop_later():
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    stops = threading.Thread(target=stop_later)

    def start(config, *, key_digests):
        deadline = time.monotonic() + 30
        while not any(text.startswith("still") for text in caplog.messages):
            assert time.monotonic() < deadline, "nothing is told of the start"
            time.sleep(0.02)
        caplog.clear()
        stops.start()

    monkeypatch.setattr(ray_of_jobs, "connect", lambda: None)
    monkeypatch.setattr(on_ray, "start", start)
    monkeypatch.setattr(on_ray, "stop", lambda: None)
    folder = save_biencoder(tmp_path / "my-model")
    try:
        assert run_serve_job(["--model", str(folder)]) == 0
    finally:
        stops.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "stop it with Ctrl-C" in capsys.readouterr().out
    # the first may have been on its way
    assert len([text for text in caplog.messages if text.startswith("still")]) <= 1


def test_a_short_name_is_served_for_what_it_stands_for():
    short, whole = next(iter(SHORT_NAMES.items()))
    (served,) = resolve(["--model", short]).models
    assert (served.name, served.model) == (short, whole)
