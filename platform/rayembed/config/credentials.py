"""Refuse passwords in addresses, because settings are published in MLflow, the run's folder and the
model card.

One check for every address: of settings (`Reference`), of commands (`pipeline.job`), of Python
calls, and of what opens an address (storage, assets, MLflow, the hub's mirror).
"""

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from rayembed.errors import ConfigError

# A scheme of two letters or more, so no drive; one slash, too, as `pathlib` leaves it. Local paths
# behind a scheme (`sqlite:////…`) have three or four.
# Or none at all, `//host/…`.
_SCHEME = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]+):/{1,2}|(?<![\w:/.-])//)(?!/)")
# What follows the first colon of the authority is a password unless it is a port. Secret keys may
# hold an unquoted slash, so the authority is not cut there.
_PASSWORD = re.compile(r"[^/?#@:]*:(?!\d+(?:[/?#]|$))[^@]*@")
# Buckets have no port, and whoever stands before one is a key.
_USER_OR_PASSWORD = re.compile(r"[^/?#@:]*(?::[^@]*)?@")
_TOKEN = re.compile(r"[^/?#@]*@")
_APART = re.compile(r"[\s'\"\[\]{}]+")
_SECRET = re.compile(
    r"passw|pwd|secret|signature|credential|authorization|bearer"
    r"|(access|api|account|private|auth|shared|storage)[_-]?key|(access|auth|session)[_-]?token"
    r"|(^|[_-])key$|^(sig|sas|auth|pass|pw|jwt|code)$"
    # Not the place in a list that is given page by page.
    r"|^(?!(next|page|pagination|continuation)[_-])(.*[_-])?token$"
)


def refuse_credentials(address: str | None) -> str | None:
    """Return the address unchanged; raise if it holds a password, secret key or token.

    Raises:
        ValueError: it does; the message does not repeat it.
    """
    found = None if address is None else next(_secrets(address), None)
    if found is None:
        return address
    raise ValueError(
        f"the address holds {found}, and settings are written into MLflow, the run's folder and "
        "the model card. Leave it out and set the environment of the processes instead: "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://, GOOGLE_APPLICATION_CREDENTIALS "
        "for gs://, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
        "MLFLOW_TRACKING_TOKEN) for an MLflow server, PGPASSWORD for PostgreSQL, HF_TOKEN for hf://"
    )


def check_address(address: object, where: str) -> None:
    """Check that an address holds no password, secret key or token.

    Args:
        where: setting, option or argument that gave it, for the message.

    Raises:
        ConfigError: it holds one; the message does not repeat it.
    """
    try:
        refuse_credentials(str(address))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def refuse_credentials_within(text: str) -> str:
    """Return the text of a `--set` value unchanged; raise if an address anywhere in it holds a
    password, secret key or token.

    Raises:
        ValueError: as `refuse_credentials`.
    """
    for part in _APART.split(text):
        refuse_credentials(part)
    return text


def without_credentials(text: str) -> str:
    """Return a text for use in a message: `…` in its place if an address in it may hold a password,
    key or token.
    """
    return "…" if holds_credentials(text) else text


def holds_credentials(value: object) -> bool:
    """Whether a value is a text with an address that contains a password, key or token."""
    return isinstance(value, str) and next(_secrets(value), None) is not None


def _secrets(text: str) -> Iterator[str]:
    """Yield a description of each secret in the addresses of a text, percent-encoded ones
    included.
    """
    for form in _unquoted(text):
        for address in _SCHEME.finditer(form):
            scheme, rest = (address[1] or "").lower(), form[address.end() :]
            user = {"s3": _USER_OR_PASSWORD, "http": _TOKEN, "https": _TOKEN}.get(scheme)
            if _PASSWORD.match(rest) or (user is not None and user.match(rest)):
                yield "a password or key before '@'"
            for part in re.split(r"[?&;#]", rest)[1:]:
                name, equals, _ = part.partition("=")
                if equals and (word := _SECRET.search(unquote_plus(name).strip().lower())):
                    yield f"a parameter with {word[0]!r} in its name"


def _unquoted(text: str) -> Iterator[str]:
    """Yield the text, then each further result of percent-decoding it, until it no longer
    changes.
    """
    yield text
    while (further := unquote(text)) != text:
        text = further
        yield text
