"""Measure a query encoder: its queries against those of the index's own model, on old documents."""

import numpy as np

from rayembed.errors import ConfigError, DataError
from rayembed_extras.index_upgrades.compare import (
    BEFORE,
    IDENTITY,
    MeasuredRoad,
    Measurement,
    sample_notes,
)
from rayembed_extras.index_upgrades.maps import identity_map
from rayembed_extras.index_upgrades.measure import (
    as_judgements,
    difference,
    rank_documents,
    score,
    share_kept,
)
from rayembed_extras.index_upgrades.models import UpgradeModel
from rayembed_extras.index_upgrades.sample import TextSample, first_sentence
from rayembed_extras.index_upgrades.settings import UpgradeRun
from rayembed_extras.indexing.judged_queries import JudgedQueries
from rayembed_extras.indexing.layout import as_compared

_FEWEST_QUERIES = 20


def compare_query_encoder(
    run: UpgradeRun,
    sample: TextSample,
    old: UpgradeModel | None,
    new: UpgradeModel,
    judged: JudgedQueries | None,
) -> Measurement:
    """Score the queries of both models on the index's vectors; the new model embeds no document.

    Args:
        judged: None: first sentences of documents; right is what the old model's queries return.

    Raises:
        ConfigError: the index's model is not there.
        DataError: too few first sentences.
    """
    if old is None:
        raise ConfigError(
            f"the model of the index {run.name!r} cannot be loaded, and a query encoder is "
            "measured against it; name it: --set old_model=…"
        )
    rows = sample.rows_of(sample.searched)
    vectors, owners = sample.old[rows], sample.owners[rows]
    texts = _sentences(run, sample) if judged is None else list(judged.texts)

    def ranked_by(model: UpgradeModel) -> np.ndarray:
        queries = as_compared(model.queries(texts), sample.number_type)
        return rank_documents(queries, vectors, owners)

    ranked = ranked_by(old)
    if judged is None:
        relevant = as_judgements(ranked)
    else:
        numbers = {name: number for number, name in enumerate(sample.names)}
        relevant = [{numbers[name]: grade for name, grade in one.items()} for one in judged.grades]
    full = score(ranked, relevant)
    scores = score(ranked_by(new), relevant)
    share, apart = share_kept(scores, full), difference(scores.ndcg, full.ndcg)
    return Measurement(
        (
            MeasuredRoad(BEFORE, "old", "old", full),
            MeasuredRoad(IDENTITY, "new", "old", scores, share, apart, "identity"),
        ),
        identity_map(new.width, sample.old.shape[1]),
        judged is not None,
        len(texts),
        int(sample.searched.sum()),
        sample.documents,
        sample.rows,
        0,
        tuple(sample_notes(sample)),
    )


def _sentences(run: UpgradeRun, sample: TextSample) -> list[str]:
    """First sentences of searched documents, as queries."""
    rows = np.searchsorted(sample.owners, np.flatnonzero(sample.searched))
    made = (first_sentence(sample.texts[row]) for row in rows.tolist())
    found = list(dict.fromkeys(sentence for sentence in made if sentence is not None))
    if len(found) < _FEWEST_QUERIES:
        raise DataError(
            f"only {len(found)} documents of the sample have a first sentence that can stand as a "
            f"query (at least {_FEWEST_QUERIES}); name judged queries (--queries)"
        )
    return found[: run.sampled_queries]
