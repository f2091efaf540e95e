"""Rejection of passwords in addresses: settings are written into MLflow, the run's folder and its
card.
"""

import re
from urllib.parse import parse_qsl, urlsplit

# What follows the first colon of the authority is a password unless it is a port. Secret keys may
# hold an unquoted slash, so the authority is not cut there.
_PASSWORD = re.compile(r"^[^:/]+://[^/?#@:]*:(?!\d+(?:[/?#]|$))[^@]*@")
# A word before a reference names the library that loads the model.
_LOADER = re.compile(r"^(?:st|mteb):(?!//)")
_TOKEN = re.compile(r"^https?://[^/?#@]*@")
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://")
_APART = re.compile(r"[\s'\"\[\]{}]+")
_SECRET = re.compile(r"passw|secret|token|signature|credential|(access|api|account)_?key|^sig$")


def refuse_credentials(address: str | None) -> str | None:
    """Return the address unchanged; raise if it holds a password, secret key or token.

    Raises:
        ValueError: it does; the message does not repeat it.
    """
    if address is None or "://" not in address:
        return address
    plain = _LOADER.sub("", address)
    query = parse_qsl(urlsplit(plain).query, keep_blank_values=True)
    values = [value for _, value in query]
    secret = [name for name, _ in query if _SECRET.search(name.lower())]
    if secret:
        found = f"the parameter {secret[0]!r}"
    elif any(_PASSWORD.search(part) or _TOKEN.search(part) for part in (plain, *values)):
        found = "a user's password or key before '@'"
    else:
        return address
    raise ValueError(
        f"the address holds {found}, and settings are written into MLflow, the run's folder and "
        "the model card. Leave it out and set the environment of the processes instead: "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://, GOOGLE_APPLICATION_CREDENTIALS "
        "for gs://, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
        "MLFLOW_TRACKING_TOKEN) for an MLflow server, PGPASSWORD for PostgreSQL, HF_TOKEN for hf://"
    )


def refuse_credentials_within(text: str) -> str:
    """Return a text of `--set` unchanged; raise if an address in its lists and groups holds a
    password, secret key or token.

    Raises:
        ValueError: as `refuse_credentials`.
    """
    for part in (text, *_APART.split(text)):
        refuse_credentials(part.strip(","))
    return text


def without_credentials(text: str) -> str:
    """The text as a message may repeat it: `…` where an address in it may hold a password, key or
    token.
    """
    found = (text[match.start() :] for match in _ADDRESS.finditer(text))
    parts = (*found, *_APART.split(text))
    return "…" if any(map(holds_credentials, parts)) else text


def holds_credentials(value: object) -> bool:
    """Whether a value is an address that contains a password, key or token."""
    try:
        refuse_credentials(value if isinstance(value, str) else None)
    except ValueError:
        return True
    return False
