"""llm-compressor's functions of single layers, loaded where they are first needed.

Its import takes nine seconds and sends its log to standard output, which it is kept from.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rayembed.errors import ConfigError

_SILENT = "LLM_COMPRESSOR_LOG_DISABLED"


def check_installed(kind: str, *packages: str) -> None:
    """Check that packages are there, without importing them.

    Raises:
        ConfigError: one is missing, with the command that installs it.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{kind} needs the package {missing[0]}, which is not installed: "
            "pip install 'rayembed[compress]'"
        )


def library(module: str) -> Any:
    """A module of llm-compressor, without its log."""
    before = os.environ.get(_SILENT)
    os.environ[_SILENT] = "true"
    try:
        return import_module(f"llmcompressor.{module}")
    finally:
        if before is None:
            del os.environ[_SILENT]
        else:
            os.environ[_SILENT] = before
