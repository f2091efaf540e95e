"""Register the reports on changed queries and on cut texts."""

from rayembed.config.reports import FindingKind

CUT_TEXTS = FindingKind(
    title="Cut texts",
    of_scores="rayembed_extras.query_changes.cut_texts:cut_texts",
)
QUERY_CHANGES = FindingKind(
    title="Changed queries",
    of_scores="rayembed_extras.query_changes.findings:changes_of_run",
    of_comparison="rayembed_extras.query_changes.findings:changes_of_comparison",
)
