"""InfoNCE with all its settings as loops over texts, without masks, hashes and blocks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayembed.data.records import Record
from rayembed.losses.infonce import InfoNCE

Vectors = Mapping[tuple[str, str], Tensor]
"""(text, role) → unit vector."""


def plain_infonce(
    records: Sequence[Record],
    vectors: Vectors,
    loss: InfoNCE,
    *,
    in_batch: bool = True,
    num_positives: int = 1,
    temperature: Tensor | None = None,
) -> Tensor:
    """Mean loss of the records' rows, at the vectors' full width.

    Args:
        temperature: in place of the loss's own.
    """
    tau = loss.temperature if temperature is None else temperature
    rows = [_sides(i, records, vectors, loss, in_batch, tau) for i in range(len(records))]
    losses = []
    for r, sides in zip(records, rows, strict=True):
        positives = list(dict.fromkeys(r.positives))[:num_positives]
        found = []
        for text in positives:
            wins = vectors[r.query, "query"] @ vectors[text, "document"] / tau
            logits = [torch.stack([wins, *side]) for side in sides]
            of_text = torch.stack([-torch.log_softmax(one, dim=0)[0] for one in logits]).mean()
            if loss.focal and of_text > 0:
                of_text = (1 - torch.exp(-of_text)) ** loss.focal * of_text
            found.append(of_text)
        losses.append(torch.stack(found).mean())
    return torch.stack(losses).mean()


def _sides(i, records, vectors, loss, in_batch, tau):
    """Logits of a row's negatives, of each softmax."""
    r = records[i]
    others = [o for o in records if o is not r and o.in_batch] if in_batch and r.in_batch else []
    query, positive = vectors[r.query, "query"], vectors[r.positives[0], "document"]
    own = [n.text for n in r.negatives if n.text not in r.positives]
    foreign = [t for o in others for t in _documents(r, o)]
    chosen = dict.fromkeys([*own, *(t for t in foreign if t not in (*r.positives, r.query))])
    first = (query @ positive).detach() + (0 if loss.false_negatives is None else _margin(loss))

    def kept(text, anchor, role):
        other = vectors[text, role]
        return loss.false_negatives is None or (anchor @ other).detach() <= first

    joint = []
    for text in chosen:
        if not kept(text, query, "document"):
            continue
        cosine = query @ vectors[text, "document"]
        weighed = loss.hardness is not None and (loss.hardness.of == "all" or text in own)
        added = loss.hardness.strength * cosine.detach() if weighed else 0.0
        joint.append(cosine / tau + added)
    sides = [joint]
    apart = [o for o in others if not _related(r, o)]
    questions = [o.query for o in apart if _may_ask(r, o)]
    answers = [t for o in others for t in _documents(r, o, not _related(r, o))]
    answers = [
        t for t in answers if t not in (*r.positives, r.query, *(n.text for n in r.negatives))
    ]
    for direction in loss.directions:
        role = "document" if direction == "document_to_document" else "query"
        anchor = query if direction == "query_to_query" else positive
        texts = dict.fromkeys(questions if role == "query" else answers)
        terms = [anchor @ vectors[t, role] / tau for t in texts if kept(t, anchor, role)]
        if loss.partition == "joint":
            joint.extend(terms)
        else:
            sides.append(terms)
    return sides


def _margin(loss):
    return loss.false_negatives.margin


def _same_class(r, o):
    return r.label is not None and (r.dataset, r.label) == (o.dataset, o.label)


def _documents(r, o, with_positive=True):
    """Documents of another row that may be negatives."""
    if o.query == r.query:
        return []
    found = [o.positives[0]] if with_positive and not _same_class(r, o) else []
    return found + ([n.text for n in o.negatives] if r.label is None else [])


def _related(r, o):
    """Whether one row's query or trained positive is a known text of the other."""
    return bool(
        {r.query, r.positives[0]} & {*o.positives} or {o.query, o.positives[0]} & {*r.positives}
    )


def _may_ask(r, o):
    """Whether another row's query may be a negative of this row's query and positive."""
    return o.query not in (r.query, r.positives[0]) and not _same_class(r, o)
