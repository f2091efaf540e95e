"""A small index in a store of this process, with jobs that build, update and upgrade it."""

from made_up_index import sentences, write
from memory_store import MemoryStore

from rayembed.config.settings import parse
from rayembed.models.loading.files import weights_fingerprint
from rayembed.registry.indexes import ReadyQuestion, index_ready
from rayembed_extras.index_upgrades.settings import UpgradeRun
from rayembed_extras.index_upgrades.switch import known_index
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.settings import IndexRun

COUNT = 120


class Watched(MemoryStore):
    """Calls a function before rows are read, written or the name is switched."""

    before = None

    def scan(self, table, columns=None):
        self.step(tuple(columns or ()))
        return super().scan(table, columns)

    def upsert(self, table, rows):
        self.step("upsert")
        super().upsert(table, rows)

    def point(self, name, table):
        self.step("point")
        super().point(name, table)

    def step(self, what):
        if self.before is not None:
            self.before(what)


class Index:
    """An index of documents with ids in a column `name`, and upgrades of it."""

    def __init__(self, home, folder):
        self.home, self.folder, self.storage = home, folder, str(folder / "outputs")
        self.rows = [{"name": row.pop("id"), **row} for row in sentences(COUNT)]
        self.path = folder / "documents.jsonl"
        self.placement = {"storage_path": self.storage, "runtime": "local"}

    def build(self, model="a", *, update=False, rows_per_part=16_384, **documents):
        if not documents:
            write(self.path, self.rows)
        given = {"path": str(self.path), "id": "name", "metadata": ["year"], **documents}
        values = {"name": "docs", "documents": given, "placement": self.placement}
        values["model"] = {"reference": str(self.home / model)}
        values["rows_per_part"] = rows_per_part
        return build_index(parse(IndexRun, values), update=update)

    def run(self, model="b", **values):
        given = {"name": "docs", "model": str(self.home / model), "placement": self.placement}
        return parse(UpgradeRun, {**given, "maps": ["identity"], **values})

    @property
    def record(self):
        manifest = known_index(self.storage, "docs")
        return manifest.tables[manifest.current]

    def ready(self, model, compatible):
        weights = weights_fingerprint(self.home / model)
        return index_ready(ReadyQuestion(self.storage, "docs", weights, compatible, model))
