"""The class that does the work of each kind of task."""

from rayembed_papers.backbone.answers import SpanWork
from rayembed_papers.backbone.retrieval import RetrievalWork
from rayembed_papers.backbone.tags import TagWork
from rayembed_papers.backbone.tasks import Finetuning
from rayembed_papers.backbone.texts import ChoiceWork, TextWork
from rayembed_papers.backbone.tokens import Tokenizer
from rayembed_papers.backbone.work import Work


def work_of(finetuning: Finetuning, tokenizer: Tokenizer) -> Work:
    """Inputs, batches and scores of the finetuning's kind."""
    match finetuning.kind:
        case "classes" | "score":
            return TextWork(finetuning, tokenizer)
        case "choices":
            return ChoiceWork(finetuning, tokenizer)
        case "tags":
            return TagWork(finetuning, tokenizer)
        case "spans":
            return SpanWork(finetuning, tokenizer)
        case "retrieval":
            return RetrievalWork(finetuning, tokenizer)
