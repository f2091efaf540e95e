"""Who does the work of a kind of task."""

from rayembed.evaluation.backbone.answers import SpanWork
from rayembed.evaluation.backbone.retrieval import RetrievalWork
from rayembed.evaluation.backbone.tags import TagWork
from rayembed.evaluation.backbone.tasks import Finetuning
from rayembed.evaluation.backbone.texts import ChoiceWork, TextWork
from rayembed.evaluation.backbone.tokens import Tokenizer
from rayembed.evaluation.backbone.work import Work


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
