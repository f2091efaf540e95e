"""Run the adaptation job from its command-line arguments. Its functions import what they need."""

from rayembed.pipeline.job import Job, JobContext, Reader, named_or_read
from rayembed.pipeline.run.training_job import A_RECIPE, SEND_METRICS, send_metrics
from rayembed_extras.adaptation.recipes import adaptation_names, get_adaptation
from rayembed_extras.adaptation.settings import Adaptation


def _base(recipe: str) -> Adaptation:
    return named_or_read(recipe, adaptation_names(), get_adaptation, Adaptation.read)


def _adapt(run: Adaptation, _: JobContext) -> None:
    from rayembed_extras.adaptation.adapt import adapt

    adapt(run)


def _list(context: JobContext) -> None:
    from rayembed_extras.adaptation.tables import print_adaptations

    print_adaptations(map(get_adaptation, adaptation_names()), out=context.out)


def _show(run: Adaptation, context: JobContext) -> None:
    from rayembed_extras.adaptation.tables import print_adaptation

    print_adaptation(run, out=context.out, tables=context.err)


_READER = Reader(
    kind=Adaptation,
    base=_base,
    recipe=A_RECIPE,
    default="nomic-adapt-quickstart",
    names=adaptation_names,
    examples="corpus.texts.en.source.path=en.jsonl",
    named=True,
)

run_adaptation_job = Job(
    options=_READER.options,
    read=_READER,
    run=_adapt,
    lists=("the recipes", _list),
    shows=("the resolved run", "what it needs", _show),
    instead=[(SEND_METRICS, send_metrics)],
)
"""The job that adapts an encoder by masked-language modelling."""
