"""`rayembed.train_reranker`: the arguments of a Python call as the settings of the job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayembed.api.calls import assignments_of, check_addresses, default_name, reference_of, shown
from rayembed.api.training import held_out_share, look_at, loss_settings
from rayembed.config.override import override
from rayembed.data.given_rows import rows_file
from rayembed.pipeline.storage import absolute_storage
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.trainer import Callback
from rayembed_extras.reranking.job import RERANKER
from rayembed_extras.reranking.train import TrainedReranker, print_trained, train

_DATASET = "data.datasets.pairs"
_MOST_LISTS = 16
"""Lists in a step, where there are enough rows."""


def train_on_pairs(
    model: str | Path,
    pairs: Any,
    given: Mapping[str, Any],
    *,
    embedder: str | Path | None,
    loss: Any,
    name: str | None,
    output: str | Path,
    callbacks: Sequence[Callback],
    settings: Mapping[str, Any],
) -> TrainedReranker:
    """Train a reranker from Python arguments; see `rayembed.train_reranker`.

    Args:
        given: settings by path of the other arguments; None where one was left out.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.pipeline.run.training_job import checked_at_hand

    check_addresses(model=model, embedder=embedder, name=name, output=output, settings=settings)
    storage = absolute_storage(str(output))
    path = rows_file(pairs, storage)
    form = {n: settings.get(f"{_DATASET}.source.{n}") for n in ("delimiter", "encoding", "quotes")}
    look = look_at(path, **form)
    share = held_out_share(look.documents)
    left = look.rows - int(look.rows * (share or 0))
    found: dict[str, Any] = {
        f"{_DATASET}.source.path": path,
        "model.backbone.path": reference_of(model),
        "placement.storage_path": storage,
        # A power of two, of which any usual number of workers has an equal share.
        "stages.rerank.batch.global_pairs": min(
            _MOST_LISTS, 1 << max(2, left // 2).bit_length() - 1
        ),
    }
    if share != 0.1:
        found |= {f"{_DATASET}.held_out.share": share} if share else {f"{_DATASET}.held_out": None}
    if embedder is not None:
        found[f"{_DATASET}.mining.teacher"] = reference_of(embedder)
    if loss is not None:
        found["stages.rerank.loss"] = loss_settings(loss)
    found |= {setting: value for setting, value in given.items() if value is not None}
    run = override(get_recipe(RERANKER), assignments_of({**found, **settings}))
    run = run.model_copy(update={"name": name or default_name("reranker", run, look.keys)})
    with shown():
        trained = train(checked_at_hand(run), callbacks=callbacks)
        print_trained(trained)
    return trained
