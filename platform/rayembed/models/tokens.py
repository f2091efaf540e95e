"""Tokenise texts: special tokens, mask of instruction tokens, truncation, padding after the
text.

One call of the fast tokenizer for a batch of texts, without its own special tokens, truncation or
padding; those are laid around the tokens here, so that nothing depends on a tokenizer's state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import normalizers, processors
from torch import Tensor

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.instructions import literal_prompt
from rayembed.config.types import Role
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.models.attention.packed import joined, pack
from rayembed.models.contract import Tokens
from rayembed.models.loading.files import read_json, write_json
from rayembed.models.loading.sentence_folder import states_lower_case

PaddingSide = Literal["right", "left"]

_SHOWN_CHARACTERS = 80


class TextTokenizer:
    """Tokenizer that adds prefix and suffix ids around the truncated tokens of prompt and text;
    picklable.

    The prompt is that of `literal_prompt`: a template filled with the instruction, a prefix of the
    role, or both.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        max_lengths: dict[Role, int],
        special: tuple[Sequence[int], Sequence[int], int] | None = None,
        pool_prompt: bool = True,
        template: str | None = None,
        prefixes: Mapping[Role, str] | None = None,
    ) -> None:
        """Store the tokenizer, its special ids and the settings of prompts.

        Args:
            special: prefix ids, suffix ids and the padding's id; None: the tokenizer's own.
        """
        self.pretrained = without_settings(pretrained)
        if special is None:
            around = special_layout(self.pretrained.backend_tokenizer)
            special = (*around, pretrained.pad_token_id or 0)
        prefix, suffix, self.pad_id = special
        self.max_lengths = max_lengths
        self._prefix = np.array(prefix, dtype=np.int32)
        self._suffix = np.array(suffix, dtype=np.int32)
        self._pool_prompt = pool_prompt
        self._template = template
        self.prefixes: dict[Role, str] = dict(prefixes or {})
        self.without_embedding: frozenset[int] = frozenset()
        """Ids that fail a pass, see `vocabulary.check_vocabulary`."""
        for role, length in max_lengths.items():
            if length <= len(prefix) + len(suffix):
                raise ConfigError(
                    f"{role}_max_length is {length}, but special tokens alone take "
                    f"{len(prefix) + len(suffix)} tokens of it; set it higher"
                )

    def prompt(self, instruction: str, role: Role = "query") -> str:
        """Return the literal prompt that this instruction puts before texts of this role."""
        return literal_prompt(instruction, self.prefixes.get(role, ""), self._template)

    def __call__(
        self,
        texts: Sequence[str],
        role: Role,
        instructions: Sequence[str] | None = None,
        *,
        allow_empty: bool = False,
    ) -> list[Tokens]:
        """Tokenise texts in their role; see `Tokenizer`."""
        prompts = [self.prompt(i, role) for i in instructions or [""] * len(texts)]
        return self.with_prompts(texts, prompts, role, allow_empty=allow_empty)

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokenise each text with its literal prompt (prefix or instruction) before it.

        Raises:
            DataError: a text has no token of its own, or its prompt leaves no room for it.
        """
        if not texts:
            return []
        backend = self.pretrained.backend_tokenizer
        joined = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        encodings = backend.encode_batch(joined, add_special_tokens=False)
        return [
            self._lay_out(encoding, text, prompt, role, allow_empty)
            for encoding, text, prompt in zip(encodings, texts, prompts, strict=True)
        ]

    def _lay_out(
        self, encoding: Any, text: str, prompt: str, role: Role, allow_empty: bool
    ) -> Tokens:
        ids = encoding.ids
        num_prompt = _num_prompt_tokens(encoding.offsets, len(prompt)) if prompt else 0
        if not self.without_embedding.isdisjoint(ids):
            own = self.pretrained.convert_ids_to_tokens(sorted(self.without_embedding))
            raise DataError(
                f"the {role} {shown(text)} contains one of the tokens {own}, for which the model "
                "has no embedding; remove the token or leave the text out"
            )
        if not allow_empty and (len(ids) == num_prompt or not text.strip()):
            raise without_tokens(text, role)
        if prompt and num_prompt >= self.budget(role) and len(ids) > num_prompt:
            raise budget_exceeded(text, prompt, num_prompt, role, self.max_lengths[role])
        whole = self._whole(np.array(ids, dtype=np.int32), role)
        pool = np.ones(len(whole), dtype=bool)
        if prompt and not self._pool_prompt:
            pool[: len(self._prefix) + num_prompt] = False
        return {"input_ids": whole, "pool_mask": pool}

    def _whole(self, own: np.ndarray, role: Role) -> np.ndarray:
        """Truncate the tokens of prompt and text to the budget, and add special tokens
        around them.
        """
        return np.concatenate([self._prefix, own[: self.budget(role)], self._suffix])

    def budget(self, role: Role) -> int:
        """Number of tokens that prompt and text may have, without special tokens."""
        return self.max_lengths[role] - len(self._prefix) - len(self._suffix)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Number of tokens that a literal prompt takes: the maximum over several texts that may
        follow it.
        """
        if not prompt:
            return 0
        # A word takes the head's trailing space into its token, a digit often does not.
        joined = [prompt + text for text in ("a", "7", "é")]
        encodings = self.pretrained.backend_tokenizer.encode_batch(joined, add_special_tokens=False)
        return max(_num_prompt_tokens(encoding.offsets, len(prompt)) for encoding in encodings)

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate `input_ids` and `attention_mask` int64, `pool_mask` bool, each (B, longest).

        Padding goes to the right.
        """
        ids, attention = padded([one["input_ids"] for one in tokens], self.pad_id)
        pool, _ = padded([one["pool_mask"] for one in tokens], False)
        return {"input_ids": ids, "attention_mask": attention, "pool_mask": pool.bool()}

    def pack(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate packed texts: `input_ids` int64, `pool_mask` bool, each (T,), and offsets."""
        rows = [one["input_ids"] for one in tokens]
        pool = joined([one["pool_mask"] for one in tokens]).bool()
        return {"input_ids": joined(rows), "pool_mask": pool, **pack(rows)}


class PrefixTokenizer(TextTokenizer):
    """Tokenizer of a prompt and a text with the model's own special tokens."""

    def __init__(
        self, pretrained: Any, config: ArchitectureConfig, *, pool_prompt: bool = True
    ) -> None:
        super().__init__(
            pretrained,
            max_lengths=config.max_lengths,
            pool_prompt=pool_prompt,
            template=config.template,
            prefixes=config.prefixes,
        )


def plain_tokenizer(pretrained: Any, max_length: int) -> TextTokenizer:
    """Make a tokenizer of texts without prompts, with the model's own special tokens."""
    return TextTokenizer(pretrained, max_lengths={"query": max_length, "document": max_length})


class SpecialIds:
    """Ids of the special tokens (BOS, EOS, padding) of a decoder."""

    def __init__(self, pretrained: Any, config: dict[str, Any]) -> None:
        """Read special ids from the tokenizer or, if it names none, from `config.json`.

        Raises:
            ArtifactError: neither names an end-of-text token.
        """
        self.bos = _first_id(pretrained.bos_token_id, config.get("bos_token_id"))
        eos = _first_id(pretrained.eos_token_id, config.get("eos_token_id"))
        if eos is None:
            raise ArtifactError(
                "neither the tokenizer nor config.json names an end-of-text token; set eos_token "
                "in tokenizer_config.json"
            )
        self.eos = eos
        pad = _first_id(pretrained.pad_token_id, eos)
        self.pad = eos if pad is None else pad


def special_ids(pretrained: Any, folder: Path) -> SpecialIds:
    """Read a decoder's special ids from its folder; raises the same errors as `SpecialIds`."""
    settings = read_json(folder / "config.json")
    return SpecialIds(pretrained, settings.get("text_config") or settings)


def _first_id(*candidates: Any) -> int | None:
    """Return the first of these ids that is set; a list counts as its first id."""
    for candidate in candidates:
        value = candidate[0] if isinstance(candidate, list | tuple) and candidate else candidate
        if isinstance(value, int):
            return value
    return None


def _num_prompt_tokens(offsets: Sequence[tuple[int, int]], prompt_length: int) -> int:
    """Count the leading tokens that end within the first `prompt_length` characters."""
    for place, (_, end) in enumerate(offsets):
        if end > prompt_length:
            return place
    return len(offsets)


def padded(
    rows: Sequence[np.ndarray], value: float, side: PaddingSide = "right"
) -> tuple[Tensor, Tensor]:
    """Pad rows to the longest; return ids and attention mask, both (B, longest) int64."""
    shape = (len(rows), max(len(row) for row in rows))
    values = np.full(shape, value, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for place, row in enumerate(rows):
        own = slice(len(row)) if side == "right" else slice(shape[1] - len(row), None)
        values[place, own] = row
        mask[place, own] = 1
    return torch.from_numpy(values), torch.from_numpy(mask)


def without_tokens(text: str, role: Role) -> DataError:
    """Make the error for a text that has no tokens."""
    return DataError(
        f"the {role} {shown(text)} has no tokens of its own, only special ones; leave the row out"
    )


def budget_exceeded(
    text: str, prompt: str, num_prompt: int, role: Role, max_length: int
) -> DataError:
    """Make the error for a prompt whose `num_prompt` tokens leave no room for the text."""
    return DataError(
        f"the instruction or prefix {shown(prompt)} takes {num_prompt} tokens, which leaves none "
        f"of {role}_max_length {max_length} for the text {shown(text)}; shorten it or raise "
        f"{role}_max_length"
    )


def pretrained_tokenizer(folder: Path, *, as_written: bool = False) -> Any:
    """Load the folder's fast tokenizer; it lower-cases texts if `do_lower_case` is set.

    Args:
        as_written: by its tokenizer.json alone. From version 5 on transformers makes its own rules
            for a `LlamaTokenizer` in place of those of the file, and reads texts that begin with a
            space or hold `</s>` in another way than NV-Embed was published with.

    Raises:
        ArtifactError: there is none.
    """
    import transformers

    if as_written and not (folder / "tokenizer.json").is_file():
        raise ArtifactError(f"no tokenizer in {str(folder)!r}: tokenizer.json is missing")
    kind = transformers.PreTrainedTokenizerFast if as_written else transformers.AutoTokenizer
    try:
        pretrained = kind.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"no tokenizer in {str(folder)!r}: {error}") from error
    if not pretrained.is_fast:
        raise ArtifactError(
            f"the tokenizer in {str(folder)!r} is not a fast one; convert it to a tokenizer.json"
        )
    if states_lower_case(folder):
        _lower_case(pretrained.backend_tokenizer)
    return pretrained


def _lower_case(backend: Any) -> None:
    """Make the tokenizer lower-case texts first, in place, as sentence-transformers does."""
    # Before BERT's own lower-casing it changes no character.
    if has_lowercase(backend) or getattr(backend.normalizer, "lowercase", False):
        return
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *_rules(backend)])


def has_lowercase(backend: Any) -> bool:
    """Whether the tokenizer's normaliser contains a plain lower-casing step."""
    return any(isinstance(rule, normalizers.Lowercase) for rule in _rules(backend))


def _rules(backend: Any) -> list[Any]:
    """Return the tokenizer's normalisation steps in order."""
    own = backend.normalizer
    if isinstance(own, normalizers.Sequence):
        parts: Any = own  # a sequence can be iterated, though its stub says nothing
        return [*parts]
    return [] if own is None else [own]


def save_tokenizer(pretrained: Any, folder: Path) -> None:
    """Save a tokenizer with its lower-casing, which a `BertTokenizer` loses when it is loaded."""
    pretrained.save_pretrained(str(folder))
    if has_lowercase(pretrained.backend_tokenizer):
        write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})


def without_settings(pretrained: Any) -> Any:
    """Switch off the tokenizer's truncation and padding, and return it.

    A tokenizer.json can bring both along (all-MiniLM-L6-v2: 128 tokens).
    """
    pretrained.backend_tokenizer.no_truncation()
    pretrained.backend_tokenizer.no_padding()
    return pretrained


def special_layout(backend: Any) -> tuple[list[int], list[int]]:
    """Return the special token ids that the tokenizer puts before and after one text."""
    encoding = backend.encode("a", add_special_tokens=True)
    own = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    if not own:
        raise ArtifactError(
            "the tokenizer makes no token of the text 'a', so its vocabulary is probably "
            "incomplete; copy or download its files again"
        )
    return list(encoding.ids[: own[0]]), list(encoding.ids[own[-1] + 1 :])


def append_stated_eos(pretrained: Any, folder: Path) -> None:
    """Make the tokenizer append EOS, in place, if its folder states so and it does not.

    `tokenizer_config.json` of intfloat/e5-mistral-7b-instruct states `add_eos_token`, its
    `tokenizer.json` puts BOS alone, and transformers 5 goes by the latter without a word: the last
    token, which is the embedding, would be the text's own.

    Raises:
        ArtifactError: the folder asks for EOS and names none.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file() or not read_json(path).get("add_eos_token"):
        return
    eos = pretrained.eos_token
    if eos is None:
        raise ArtifactError(f"{str(path)!r} has add_eos_token=true but no eos_token; set eos_token")
    backend = without_settings(pretrained).backend_tokenizer
    prefix, suffix = special_layout(backend)
    if pretrained.eos_token_id in suffix:
        return
    before = pretrained.convert_ids_to_tokens(prefix)
    behind = [*pretrained.convert_ids_to_tokens(suffix), eos]
    special = {*zip(before, prefix, strict=True), *zip(behind[:-1], suffix, strict=True)}
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        pair=[*before, "$A", *behind, *before, "$B", *behind],
        special_tokens=sorted({*special, (eos, pretrained.eos_token_id)}),
    )


def check_tokenizer(
    pretrained: Any, folder: Path, *, row_positions: int | None, padding: int | None
) -> None:
    """Raise if transformers would make other inputs than rayembed with this tokenizer.

    Here texts are cut at their end, read behind each other or with padding behind them, and are of
    one token type. What else tokenizers are set to, `tokenizers` itself does for both.

    Args:
        pretrained: as read from the folder.
        row_positions: learnt positions of the model that are counted from the row's start, padding
            included; None: it has none.
        padding: id that the model leaves out when it counts positions; None: it counts all.

    Raises:
        ArtifactError: such a setting, by its name.
    """
    names, backend = pretrained.model_input_names, pretrained.backend_tokenizer
    types = set(backend.encode("a").type_ids) if "token_type_ids" in names else {0}
    dropout = getattr(backend.model, "dropout", None)
    wrong = {
        "truncation_side": (pretrained.truncation_side, pretrained.truncation_side != "right"),
        "padding_side": (
            pretrained.padding_side,
            pretrained.padding_side != "right" and row_positions is not None,
        ),
        "pad_token_id": (
            pretrained.pad_token_id,
            padding is not None and pretrained.pad_token_id != padding,
        ),
        "split_special_tokens": (True, pretrained.split_special_tokens),
        "model_input_names": (names, not {"input_ids", "attention_mask"} <= set(names)),
        "token type": (sorted(types), types != {0}),
        "dropout": (dropout, bool(dropout)),
    }
    for name, (value, refused) in wrong.items():
        if refused:
            raise ArtifactError(
                f"the tokenizer in {str(folder)!r} has {name}={value!r} (tokenizer_config.json, "
                "tokenizer.json, config.json), so transformers and rayembed would make different "
                "inputs of a text; to evaluate the model unchanged, use the reference `st:` "
                "followed by its path, or save the tokenizer with the default value"
            )


def shown(text: str) -> str:
    """Return the beginning of a text as messages quote it."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return repr(cut)
