"""Import FAISS, which the user installs from one of two packages."""

from typing import Any

from rayembed.errors import ConfigError


def require_faiss(what: str) -> Any:
    """Import the module `faiss`, or raise with advice.

    Args:
        what: that needs it, in the plural, for the message.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"{what} need FAISS, which cannot be imported ({error}); install one of its builds: "
            "in the checkout, pip install '.[cpu]' or '.[gpu]'"
        ) from None
    return faiss
