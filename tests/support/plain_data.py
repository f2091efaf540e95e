"""Preparation and plan by their definitions: plain loops over the rows of small sources.

What a seed draws (which documents are held out, which records are sampled) is read from the result
and only checked for its size; all else is computed here a second time.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from itertools import combinations


def same(text):
    """The text without its case, width and white space; other signs of Unicode stay."""
    narrow = "".join(
        unicodedata.normalize("NFKC", c) if c == "\u3000" or "\uff01" <= c <= "\uffee" else c
        for c in text
    )
    return " ".join(unicodedata.normalize("NFC", narrow).casefold().split())


def records_of(row, both_directions=False):
    """Records of a row as (query, positives, negatives), or the reason why it has none; and how
    many of its negatives are copies of its other texts."""
    query, positives = row["query"], [p for p in row["positive"] if p.strip()]
    if not query.strip():
        return "no query", 0
    if not positives:
        return "no positive", 0
    positives = [p for p in dict.fromkeys(positives) if p != query]
    if not positives:
        return "positive equals query", 0
    given = [n for n in dict.fromkeys(row["negatives"]) if n.strip()]
    own = {same(text) for text in (query, *positives)}
    kept = tuple(n for n in given if same(n) not in own)
    made = [(query, tuple(positives), kept)]
    if both_directions:
        made += [(positive, (query,), ()) for positive in positives]
    return made, len(given) - len(kept)


def texts_of(record):
    """Query and positives of a record, as they are compared."""
    return {same(text) for text in (record[0], *record[1])}


def left_of(rows, held_out, both_directions=False):
    """Records of the rows that have no held-out text, in their order and each once, without
    held-out negatives; and the number of rows by what became of them."""
    counts, records = Counter(), {}
    for row in rows:
        made, copied = records_of(row, both_directions)
        if isinstance(made, str):
            counts[made] += 1
        elif any(texts_of(one) & held_out for one in made):
            counts["held out"] += 1
        else:
            counts["used"] += 1
            counts["copied"] += copied
            for query, positives, negatives in made:
                left = tuple(n for n in negatives if same(n) not in held_out)
                # A record is named by its texts before held-out negatives go.
                records.setdefault((query, positives, negatives), (query, positives, left))
                counts["made"] += 1
    return list(records.values()), counts


def grams(record, n):
    """Word n-grams of query and positives, each marked by its side."""
    found = set()
    for side, text in [(0, record[0]), *((1, text) for text in record[1])]:
        whole = unicodedata.normalize("NFKC", text).casefold()
        words = re.findall(r"\w+", whole) or [whole]
        found |= {(side, *words[i : i + n]) for i in range(max(len(words) - n + 1, 1))}
    return found


def groups_of_near_duplicates(records, threshold, n):
    """Sets of row numbers that similar pairs link."""
    sets = [grams(record, n) for record in records]
    groups = [{i} for i in range(len(records))]
    for i, j in combinations(range(len(records)), 2):
        common = len(sets[i] & sets[j])
        similarity = common / (len(sets[i]) + len(sets[j]) - common)
        assert not threshold - 0.05 < similarity < threshold + 0.05, "signatures may miss the pair"
        if similarity >= threshold and groups[i] is not groups[j]:
            groups[i] |= groups[j]
            for k in groups[j]:
                groups[k] = groups[i]
    return [set(group) for group in {id(group): group for group in groups}.values()]


def steps_of(epochs, records, batch):
    """Steps of so many passes over all records."""
    return max(1, round(epochs * records / batch))


def check_plan(steps, records, weights):
    """Check draws of a blended plan: shares, every row equally often, its positives in turn.

    Returns for each data set the rows that are drawn, their positives, and those that are trained.

    Args:
        steps: of each step its rows as (data set, name, positives).
        records: data set → name → positives.
        weights: data set → weight.
    """
    drawn, total = defaultdict(Counter), sum(map(len, steps))
    for dataset, name, positives in (row for step in steps for row in step):
        own = list(records[dataset][name])
        turn = drawn[dataset][name] % len(own)
        assert list(positives) == own[turn:] + own[:turn], "not the positive of its turn"
        drawn[dataset][name] += 1
    for dataset, names in records.items():
        number = drawn[dataset].total()
        assert abs(number - total * weights[dataset] / sum(weights.values())) < 1
        often = {drawn[dataset][name] for name in names}
        assert often <= {number // len(names), -(-number // len(names))}, "not equally often"
    found = {}
    for dataset, names in records.items():
        often = {name: drawn[dataset][name] for name in names if drawn[dataset][name]}
        every = sum(len(names[name]) for name in often)
        trained = sum(min(number, len(names[name])) for name, number in often.items())
        found[dataset] = len(often), {"all": every, "trained": trained}
    return found
