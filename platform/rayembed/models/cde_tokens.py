"""CDE's tokens: a prefix or an instruction before a text, the same for both stages."""

from typing import Any

from rayembed.config.model import CDEConfig
from rayembed.models.contract import Role
from rayembed.models.tokens import PrefixTokenizer


class CDETokenizer(PrefixTokenizer):
    """Tokenizer of `instruction (or role prefix) + text` with the model's own special tokens."""

    def __init__(self, pretrained: Any, config: CDEConfig) -> None:
        super().__init__(pretrained, config, pool_prompt=config.pool_instruction)
        self._template = config.instruction_template

    def prompt(self, instruction: str, role: Role) -> str:
        """Literal prompt before a text of this role with this instruction."""
        if not instruction:
            return self.prefixes[role]
        return self._template.replace("{instruction}", instruction)
