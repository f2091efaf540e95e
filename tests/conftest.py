"""What all tests share: no telemetry, no network in unit tests, one Ray token of their own."""

import os
import secrets
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from rayembed.pipeline.local_head import prepare_environment

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TESTS_SUPPORT"] = str(Path(__file__).parent / "support")

# Ray reads once, when it is first imported, whether and with which token it authenticates: all
# tests of a session share one answer, and the user's own token file is left alone.
_token_folder = tempfile.TemporaryDirectory(prefix="rayembed-tests-")
_token = Path(_token_folder.name, "auth_token")
_token.write_text(secrets.token_hex(32))
_token.chmod(0o600)
os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token)
os.environ["RAY_AUTH_MODE"] = "token"
prepare_environment()

# A deadline of an example measures the machine.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

HEAVY = ("distributed", "ray", "job", "assets")


def pytest_collection_modifyitems(config, items):
    """Keep unit and parity tests off the network, loopback excepted; skip GPU tests visibly, and
    those of minutes unless `-m slow` asks for them.
    """
    import torch

    for item in items:
        if not any(item.get_closest_marker(name) for name in HEAVY):
            item.add_marker(pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"]))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes many minutes; run it with -m slow"))
