"""Records of made-up words with everything that a mask must see: repeats, classes, short lists."""

import random

from rayembed.data.records import Negative, Record


def made_up_records(count: int, *, num_negatives: int = 2, seed: int = 0) -> list[Record]:
    """`count` records; some share texts, some have a class, some have fewer negatives."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 12)))

    pool = [word() for _ in range(count)]
    records = []
    for i in range(count):
        labelled = i % 4 == 3
        positives = (rng.choice(pool), word()) if i % 3 == 0 else (word(),)
        negatives = [Negative(rng.choice(pool)) for _ in range(num_negatives)]
        if i % 5 == 1 and not labelled:
            negatives.pop()
        query = rng.choice(pool) if i % 6 == 2 else word()
        records.append(
            Record(
                id=str(i),
                query=query,
                positives=positives,
                negatives=tuple(n for n in negatives if n.text != query),
                dataset="classes" if labelled else "pairs",
                label=rng.choice("xy") if labelled else None,
                in_batch=i % 7 != 5,
            )
        )
    return records
