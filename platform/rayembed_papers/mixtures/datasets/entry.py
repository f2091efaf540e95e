"""The papers, and the homes of their data sets."""

from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.data_recipes import Home, Paper

NV_EMBED = Paper("NV-Embed", "nvembed", "2405.17428")
NOMIC = Paper("Nomic Embed v2", "nomic", "2502.07972")
CAUSAL2VEC = Paper("Causal2Vec", "causal2vec", "2507.23386")
CDE = Paper("CDE", "cde", "2410.02525")


def hub(repository: str, inside: str, revision: str = "main") -> str:
    """Reference to the files of a hub data set."""
    return f"hf://datasets/{repository}@{revision}/{inside}"


def hub_page(repository: str) -> str:
    """Web page of a hub data set."""
    return f"https://huggingface.co/datasets/{repository}"


def own_folder(name: str, notes: str, url: str = "") -> Home:
    """Rows of `query` and `positive` (a text or a list) in folder `name` below `data.root`."""
    return Home(PairsSource(path=f"{name}/"), url, "own", notes=notes)
