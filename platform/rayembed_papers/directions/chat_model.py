"""Generate answers with a small chat model in this process, on its CPU cores.

Prompts that begin alike, with the same instructions and examples, share the states of that
beginning.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from rayembed.errors import ArtifactError
from rayembed.machine.cores import num_cores
from rayembed.models.tokens import padded, pretrained_tokenizer

Conversation = Sequence[Mapping[str, str]]
"""Messages with `role` and `content`, the user's last."""


def answers_of(
    folder: Path,
    conversations: Sequence[Conversation],
    *,
    new_tokens: int,
    batch_size: int,
    stop: str,
) -> Iterator[tuple[int, str]]:
    """Yield the index of each conversation with its greedily decoded answer, in float32.

    Those with prompts of like length are answered together, so that the order is not theirs. The
    same batches give the same answers on the same kind of CPU.

    Args:
        folder: of a decoder with its tokenizer and chat template.
        new_tokens: most tokens of an answer.
        stop: text of a token that ends an answer, as the model's own end does.

    Raises:
        ArtifactError: no such model there, or weights are missing.
    """
    tokenizer = pretrained_tokenizer(folder)
    model = _load(folder)
    rows = [
        tokenizer.apply_chat_template(list(one), add_generation_prompt=True, return_dict=False)
        for one in conversations
    ]
    shared = _shared(rows)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(stop)]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    with _all_cores():
        beginning = _states(model, rows[0][:shared])
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            chosen = [rows[place] for place in places]
            new = _continued(model, chosen, beginning, shared, ends, new_tokens)
            for place, tokens in zip(places, new, strict=True):
                text = tokenizer.decode(
                    tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                yield place, text


@torch.inference_mode()
def _continued(
    model: Any,
    rows: Sequence[list[int]],
    beginning: transformers.DynamicCache,
    shared: int,
    ends: list[int],
    new_tokens: int,
) -> Tensor:
    """Decode greedy continuations of each row, (B, at most `new_tokens`), padded with an
    end token.

    Args:
        beginning: states of the `shared` first tokens of every row.
        ends: ids that end a row.
    """
    own, mask = padded([np.array(row[shared:]) for row in rows], ends[0], "left")
    first = torch.tensor(rows[0][:shared]).expand(len(rows), -1)
    states = copy.deepcopy(beginning)
    states.batch_repeat_interleave(len(rows))
    found: Tensor = model.generate(
        input_ids=torch.cat([first, own], dim=1),
        attention_mask=torch.cat([torch.ones_like(first), mask], dim=1),
        past_key_values=states,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    return found[:, shared + own.shape[1] :]


def _shared(rows: Sequence[list[int]]) -> int:
    """Count the leading tokens that all rows share, at most all but the last token of a row."""
    pairs = zip(min(rows), max(rows), strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(alike, min(map(len, rows)) - 1)


def _load(folder: Path) -> Any:
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"cannot load the model in {str(folder)!r}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ArtifactError(
            f"the model in {str(folder)!r} lacks {len(missing)} weights needed to generate, such "
            f"as {missing[0]!r}"
        )
    return model.eval()


@torch.inference_mode()
def _states(model: Any, beginning: Sequence[int]) -> transformers.DynamicCache:
    """Compute the keys and values of the tokens that all prompts share, once for a single row."""
    states = transformers.DynamicCache(config=model.config)
    if beginning:
        model.base_model(input_ids=torch.tensor([beginning]), past_key_values=states)
    return states


@contextmanager
def _all_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)
