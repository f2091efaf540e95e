"""Settings of stores that read a password or key from the environment."""

import os
import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from rayembed.errors import ConfigError
from rayembed_extras.indexing.settings import StoreSettings

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def _checked_name(value: str) -> str:
    """Check a variable's name; the message does not repeat it: it may be the secret itself."""
    if _VARIABLE.fullmatch(value) is None:
        raise ValueError(
            "is the name of an environment variable, in capital letters, digits and _; the secret "
            "itself belongs into that variable, never into settings"
        )
    return value


SecretVariable = Annotated[str, AfterValidator(_checked_name)]
"""Name of an environment variable with a secret."""


class SecretStoreSettings(StoreSettings):
    """Base class for the settings of a store whose secret is in an environment variable."""

    secret_from: ClassVar[str]
    """Setting with the variable's name, in all processes that write."""

    def _variables(self) -> tuple[str, str]:
        """Names of the variable that the setting names, and of its default."""
        return getattr(self, self.secret_from), type(self).model_fields[self.secret_from].default

    def secret(self) -> str | None:
        """Read the secret from the environment; None: the default variable is not set.

        Raises:
            ConfigError: the variable that the settings name is not set.
        """
        variable, default = self._variables()
        value = os.environ.get(variable)
        if value is None and variable != default:
            raise ConfigError(
                f"store.{self.secret_from} names the environment variable {variable}, which is "
                "not set in this process; set it on every node, or remove the setting"
            )
        return value or None

    def without_secrets(self, message: str) -> str:
        """Replace this process's secrets in a message."""
        for variable in self._variables():
            if value := os.environ.get(variable):
                message = message.replace(value, "…")
        return message
