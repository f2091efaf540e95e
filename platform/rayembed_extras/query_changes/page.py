"""Write an HTML page of changed queries: both rankings side by side, with likely causes."""

from collections.abc import Sequence
from importlib.resources import files

import jinja2

from rayembed_extras.query_changes.causes import NONE
from rayembed_extras.query_changes.changes import (
    SHOWN,
    Change,
    TaskChanges,
    causes_table,
)

_DOCUMENT = 160
"""Characters of a document that are shown; all of up to `_WHOLE` on request."""
_WHOLE = 1200
_QUERY = 400


def changes_page(before: str, after: str, tasks: Sequence[TaskChanges]) -> str:
    """Render the page as self-contained HTML; texts are escaped.

    Args:
        before, after: names of both models.
    """
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        files("rayembed_extras.query_changes").joinpath("page.html").read_text(encoding="utf-8")
    )
    page: str = template.render(
        before=before,
        after=after,
        shown=SHOWN,
        causes=causes_table(tasks),
        no_cause=NONE,
        tasks=[
            {
                "name": task.name,
                "task": task,
                "causes": causes_table([task]),
                "groups": [
                    ("Losses", [_shown(one, task) for one in task.losses]),
                    ("Gains", [_shown(one, task) for one in task.gains]),
                ],
            }
            for task in tasks
        ],
    )
    return page


def _shown(change: Change, task: TaskChanges) -> dict[str, object]:
    """Convert a changed query to the values that the template reads."""
    rankings = [
        [
            {
                "id": document,
                "relevant": document in change.relevant,
                "rank": rank,
                "other": other.rank_of(document),
                **_texts(task.texts.get(document, "")),
            }
            for rank, document in enumerate(result.best, 1)
        ]
        for result, other in ((change.before, change.after), (change.after, change.before))
    ]
    listed = {document for result in (change.before, change.after) for document in result.best}
    return {
        "text": _cut(change.text, _QUERY),
        "id": change.query,
        "before": change.before.score,
        "after": change.after.score,
        "difference": change.difference,
        "causes": change.causes,
        "rankings": rankings,
        "unranked": [
            {"id": document, **_texts(task.texts.get(document, ""))}
            for document in change.relevant
            if document not in listed
        ],
    }


def _texts(text: str) -> dict[str, str]:
    short, whole = _cut(text, _DOCUMENT), _cut(text, _WHOLE)
    return {"short": short, "whole": "" if short == whole else whole}


def _cut(text: str, characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
