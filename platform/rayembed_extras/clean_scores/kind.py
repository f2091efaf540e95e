"""Register clean scores as a kind of report that `placement.findings` can select."""

from rayembed.config.reports import FindingKind

CLEAN_SCORES = FindingKind(
    "Clean scores",
    of_scores="rayembed_extras.clean_scores.finding:clean_scores",
    of_comparison="rayembed_extras.clean_scores.finding:compared_clean_scores",
)
