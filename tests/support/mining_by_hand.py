"""Mining by its definition: plain loops over all documents, texts as texts, for small corpora.

Vectors are small whole numbers drawn by the text: exact in float16 and full of equal scores.
"""

import re
import unicodedata
import zlib
from functools import lru_cache

import numpy as np

from rayembed.data.records import Negative, Record

DIMENSIONS = 4
WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heron", "iris", "jade"]


def vectors_of(texts, teacher="a"):
    """(n, 4) float32 of whole numbers from -2 to 2, drawn by teacher and text."""
    made = [_vector_of(text, teacher) for text in texts]
    return np.array(made, dtype=np.float32).reshape(-1, DIMENSIONS)


@lru_cache(maxsize=1 << 16)
def _vector_of(text, teacher):
    seed = zlib.crc32(f"{teacher} {text}".encode())
    return np.random.default_rng(seed).integers(-2, 3, DIMENSIONS)


def load(config, weights, device):
    """As `load_teacher`, for a `TeacherLoader`; teachers differ by their names."""
    return lambda texts, role: vectors_of(texts, config.teacher)


def cross_score(query, text):
    """A score in [0, 1] that has nothing to do with the teacher's; many are equal."""
    return zlib.crc32(f"{query}|{text}".encode()) % 21 / 20


def load_cross_encoder(config, weights, device):
    """As that of mining: scores by `cross_score`."""
    return lambda pairs: np.array([cross_score(*pair) for pair in pairs], dtype=np.float32)


def as_float32(value):
    """The value as records keep it."""
    return float(np.float32(value))


def made_up_texts(count, seed):
    """Distinct texts of six to eight words; every third is a near-duplicate of another."""
    rng = np.random.default_rng(seed)
    texts = {}
    while len(texts) < count:
        words = " ".join(rng.choice(WORDS, 6))
        texts[words] = None
        if len(texts) % 3 == 0:
            texts[f"{words} {rng.choice(WORDS)}"] = None
            texts[f"{words.title()}!"] = None
    return list(texts)[:count]


def made_up_rows(count, seed, *, labels=False, given=False):
    """Rows that share positives and queries; some have two positives, a class, negatives."""
    rng = np.random.default_rng(seed)
    texts = made_up_texts(60, seed)
    queries = [f"query {i}" for i in range(max(2, count * 3 // 4))] + texts[:3]
    rows = []
    for number in range(count):
        query = str(rng.choice(queries))
        drawn = [str(t) for t in rng.choice(texts, 14, replace=False) if t != query]
        asked = vectors_of([query])[0]
        # Positives mostly score high, as those of real rows do.
        picked = sorted(drawn[:8], key=lambda text: -float(asked @ vectors_of([text])[0]))
        positives, negatives = picked[: 1 + number % 2], drawn[8 : 8 + number % 6]
        rows.append(
            Record(
                id=f"row {number}",
                query=query,
                positives=tuple(positives),
                negatives=tuple(Negative(text) for text in negatives) if given else (),
                dataset="d",
                label=str(rng.choice(["x", "y", "z"])) if labels and number % 4 else None,
            )
        )
    return rows


def similarity(a, b):
    """Jaccard similarity of word trigrams."""
    first, second = (
        {tuple(w[i : i + 3]) for i in range(max(1, len(w) - 2))} for w in map(_words, (a, b))
    )
    return len(first & second) / len(first | second)


def _words(text):
    return re.findall(r"\w+", text.lower())


def limit(rule, positive):
    """What a negative may score at most."""
    if rule.kind == "top_k":
        return float("inf")
    if rule.kind == "top_k_abs":
        return rule.max_score
    if rule.kind == "top_k_margin_pos":
        return positive - rule.margin
    return positive - (1 - rule.max_relative_score) * abs(positive)


def same(text):
    """The text without its case, width and white space; other signs of Unicode stay."""
    narrow = "".join(
        unicodedata.normalize("NFKC", c) if c == "\u3000" or "\uff01" <= c <= "\uffee" else c
        for c in text
    )
    return " ".join(unicodedata.normalize("NFC", narrow).casefold().split())


def positives_of(row, rows, most_shared=1000):
    """The row's positives and those of other rows that ask the same, unless these are too many."""
    positives = {t for r in rows if same(r.query) == same(row.query) for t in r.positives}
    return positives if len(positives) <= most_shared else set(row.positives)


def allowed(rows, config, teacher, more=(), most_shared=1000):
    """For each row all that may be a negative by one teacher, best first.

    As (text, rank, score, cross_score), with both scores of the first positive beside the list.
    """
    documents = list(dict.fromkeys([t for r in rows for t in r.positives] + list(more)))
    classes = {t: {r.label for r in rows if r.label and t in r.positives} for t in documents}
    found = []
    for row in rows:
        positives = positives_of(row, rows, most_shared)
        query = vectors_of([row.query], teacher)[0]

        def score(text, query=query):
            return float(query @ vectors_of([text], teacher)[0])

        own = [n.text for n in row.negatives]
        pool = own if config.pool == "given" else documents
        ranked = sorted(pool, key=lambda text: -score(text))
        window = list(enumerate(ranked))
        if config.pool == "corpus":
            window = window[config.skip : config.candidates]
        lowest = min(map(score, positives))
        refused = {same(text) for text in (row.query, *positives)}
        left = []
        for rank, text in window:
            if same(text) in refused:
                continue
            if config.pool == "corpus" and text in own:
                continue
            if row.label and row.label in classes.get(text, ()):
                continue
            near = config.near_duplicate
            if near is not None and any(similarity(text, p) >= near for p in positives):
                continue
            left.append((text, rank, score(text)))
        first = row.positives[0]
        if config.rescoring is None:
            crossed_first = None
            most = limit(config.rule, lowest)
            kept = [(*one, None) for one in left if one[2] <= most]
        else:
            crossed = [(*one, as_float32(cross_score(row.query, one[0]))) for one in left]
            of_positives = [as_float32(cross_score(row.query, p)) for p in positives]
            most = limit(config.rule, min(of_positives))
            kept = sorted((one for one in crossed if one[3] <= most), key=lambda one: -one[3])
            crossed_first = as_float32(cross_score(row.query, first))
        found.append((kept, (score(first), crossed_first)))
    return found


def mined(rows, config, more=(), most_shared=1000):
    """The rows with their negatives as (text, rank, score, rule, teacher, cross_score), and the
    first positive's scores by both, for `sampling = best`."""
    teachers = [config.teacher, *(t.teacher for t in config.further_teachers)]
    by_teacher = [allowed(rows, config, teacher, more, most_shared) for teacher in teachers]
    result = []
    for number, row in enumerate(rows):
        positives = positives_of(row, rows, most_shared)
        refused = {same(text) for text in (row.query, *positives)}
        own = [n.text for n in row.negatives if same(n.text) not in refused]
        kept = [] if config.pool == "given" else own
        negatives = [(text, None, None, "given", None, None) for text in kept]
        waiting = [list(of_teacher[number][0]) for of_teacher in by_teacher]
        taken = set()
        while any(waiting) and len(negatives) < config.num_negatives:
            for teacher, lists in zip(teachers, waiting, strict=True):
                while lists and lists[0][0] in taken:
                    lists.pop(0)
                if lists and len(negatives) < config.num_negatives:
                    text, rank, score, cross = lists.pop(0)
                    taken.add(text)
                    rule = config.rule.kind
                    negatives.append((text, rank, score, rule, f"weights of {teacher}", cross))
        result.append((negatives, by_teacher[0][number][1]))
    return result
