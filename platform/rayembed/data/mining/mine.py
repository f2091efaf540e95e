"""The mining step: records with hard negatives from a teacher."""

from rayembed.config.data import DatasetConfig
from rayembed.data.mining.tasks import MinePart
from rayembed.data.prepared import Making, Prepared, Workshop
from rayembed.data.units import run_units
from rayembed.data.vectors.embed import PartUnit, embed_parts

CODE_VERSION = 3
"""Of mining; raised whenever it chooses other negatives of the same inputs."""


def make_mined(workshop: Workshop, dataset: DatasetConfig, before: Prepared) -> Prepared:
    """The folder of the records with their hard negatives."""
    config = dataset.mining
    assert config is not None
    weights = workshop.teaching.fingerprint(config.teacher)
    inputs = {
        "code": CODE_VERSION,
        "settings": config.model_dump(mode="json", exclude={"teacher"}),
        "teacher": weights,
        "records": before.fingerprint,
    }
    making = Making(workshop.storage, "mined", dataset.name, inputs, before)
    if (found := making.found()) is not None:
        return found
    vectors = embed_parts(workshop, dataset.name, making.folder, before.parts, config)
    task = MinePart(making.parts_folder, vectors, tuple(before.parts), config, weights)
    units = [PartUnit(part) for part in before.parts]
    what = f"mine {dataset.name}"
    results = run_units(making.folder, what, task, units, workshop.execute, "gpu or cpu")
    return making.finish(
        results,
        [item for result in results for item in result["parts"]],
        mined=sum(result["mined"] for result in results),
        without_negatives=sum(result["without"] for result in results),
    )
