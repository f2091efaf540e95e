"""Register the scores on an old index as a report that `placement.findings` selects."""

from rayembed.config.reports import FindingKind

OLD_INDEX = FindingKind(
    "Old index", of_scores="rayembed_extras.model_pairs.finding:scores_on_old_index"
)
