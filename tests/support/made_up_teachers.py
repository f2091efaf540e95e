"""Teachers whose vectors are drawn by a text's role and hash, and what a batch learns from them."""

import numpy as np
import torch

from rayembed.data.hashes import text_hash


class MadeUpTeacher:
    """Vectors of any texts, as `StoredVectors` gives them."""

    def __init__(self, width: int, seed: int = 0) -> None:
        self.width, self.seed = width, seed

    def __call__(self, texts):
        return np.stack([self.vector(role, hashed) for role, hashed in texts])

    def vector(self, role, hashed):
        draw = np.random.default_rng([hashed % 2**63, role == "query", self.seed])
        drawn = draw.standard_normal(self.width)
        return (drawn / np.linalg.norm(drawn)).astype(np.float16)

    def of_text(self, text, role):
        return torch.from_numpy(self.vector(role, text_hash(text))).float()


TEACHERS = (MadeUpTeacher(5), MadeUpTeacher(8, seed=1))
"""One of another width than the toy model's, and one of its width."""


def own_texts(record, num_negatives):
    """Positive and negatives of a record, as its row has them."""
    return [record.positives[0], *(n.text for n in record.negatives[:num_negatives])]


def met(records, record, num_negatives, in_batch=True):
    """Distinct documents that a record's query meets in the batch, by a loop."""
    texts = dict.fromkeys(own_texts(record, num_negatives))
    if in_batch and record.in_batch:
        for other in records:
            if other.in_batch:
                texts |= dict.fromkeys(own_texts(other, num_negatives))
    return list(texts)


def taught_loss(model, records, loss, num_negatives, *, in_batch=True, projection=None):
    """Mean over records of what teachers alone ask for, by loops over texts.

    Args:
        loss: settings of `vector_distillation` or `similarity_distillation`.
        projection: (sum of the teachers' widths, D), or none.
    """

    def vector(text, role):
        return model(model.tokenizer.collate(model.tokenizer([text], role)), None).embeddings[0]

    losses = []
    for record in records:
        query, first = vector(record.query, "query"), 0
        for teacher in TEACHERS:
            wanted = teacher.of_text(record.query, "query")
            if loss.kind == "vector_distillation":
                matrix = projection[first : first + teacher.width]
                first += teacher.width

                def far(mine, theirs, matrix=matrix):
                    mine = matrix @ mine
                    if loss.form == "mse":
                        return ((mine - theirs) ** 2).sum() / len(theirs)
                    return 1 - mine @ theirs / (mine.norm() * theirs.norm())

                own = own_texts(record, num_negatives)
                of_own = [
                    far(vector(text, "document"), teacher.of_text(text, "document")) for text in own
                ]
                losses.append((far(query, wanted) + torch.stack(of_own).mean()) / 2)
                continue
            texts = met(records, record, num_negatives, in_batch)
            mine = torch.stack([query @ vector(text, "document") for text in texts])
            theirs = torch.stack([wanted @ teacher.of_text(text, "document") for text in texts])
            if loss.form == "mse":
                losses.append(((mine - theirs) ** 2).mean())
            else:
                p = (theirs / loss.teacher_temperature).softmax(0)
                log_q = (mine / loss.temperature).log_softmax(0)
                losses.append((p * (p.log() - log_q)).sum())
    return torch.stack(losses).mean()


def false_negatives(records, record, num_negatives, margin):
    """Hashes of the batch's documents that a teacher scores above the record's positive by more
    than a margin, by a loop in exact numbers.
    """
    found = []
    texts = dict.fromkeys(t for r in records for t in own_texts(r, num_negatives))
    for teacher in TEACHERS:
        query = teacher.vector("query", text_hash(record.query)).astype(np.longdouble)

        def cosine(text, query=query, teacher=teacher):
            return query @ teacher.vector("document", text_hash(text)).astype(np.longdouble)

        limit = cosine(record.positives[0]) + np.longdouble(margin)
        found += [text_hash(t) for t in texts if cosine(t) > limit]
    return list(dict.fromkeys(found))
