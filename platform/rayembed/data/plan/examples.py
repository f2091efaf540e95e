"""In-context examples in front of the queries of a step, as in bge-en-icl (arXiv 2409.15700).

Examples are other pairs of the same global batch, so they need no data of their own. They depend on
the plan, the step and the row's slot alone: every number of workers sees the same ones.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayembed.data.hashes import text_hash
from rayembed.data.plan.batch_plan import BatchPlan, Pair
from rayembed.data.records import Record
from rayembed.models.contract import InContextTokenizer


def with_examples(
    plan: BatchPlan,
    step: int,
    records: Sequence[Record],
    first_slot: int,
    tokenizer: InContextTokenizer,
) -> list[Record]:
    """Records with in-context examples added to each query's instruction.

    A query gets from none to `max_examples` examples, uniformly distributed, drawn without
    replacement from the pairs of its data set with its instruction, as far as the tokenizer's
    budget allows. Its own text and its positives are never shown. A query without instruction has
    no template for examples and gets none.

    Args:
        first_slot: place of the first record in the global batch.
    """
    pairs = plan.read_pairs(step)
    return [
        _instructed(record, pairs, _random(plan, step, first_slot + place), tokenizer)
        for place, record in enumerate(records)
    ]


def _instructed(
    record: Record,
    pairs: Sequence[Pair],
    random: np.random.Generator,
    tokenizer: InContextTokenizer,
) -> Record:
    wanted = int(random.integers(tokenizer.max_examples + 1))
    task, own = (record.dataset, record.query_instruction), {record.query, *record.positives}
    shown: dict[tuple[str, str], None] = {}  # equal pairs of several slots are one example
    for place in random.permutation(len(pairs)) if record.query_instruction else ():
        pair = pairs[place]
        if len(shown) == wanted:
            break
        if (pair.dataset, pair.query_instruction) == task and own.isdisjoint(
            (pair.query, *pair.positives)
        ):
            shown[pair.query, pair.positives[0]] = None
    told = tokenizer.instruct(record.query_instruction, list(shown))
    return replace(record, query_instruction=told)


def _random(plan: BatchPlan, step: int, slot: int) -> np.random.Generator:
    return np.random.default_rng([text_hash(plan.fingerprint) % 2**63, step, slot])
