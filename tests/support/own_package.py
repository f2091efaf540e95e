"""Packages of a user, made of the blocks of a page, which a process finds as installed ones."""

import os
import re
from pathlib import Path


def own_package(page: str, folder: Path) -> dict[str, str]:
    """Write the page's files `# my_package/NAME.py` and its entry points into a folder.

    Returns:
        The environment of a process in which the package is installed.
    """
    files = re.findall(r"^```python\n# my_package/(\S+)\n(.*?)^```", page, re.M | re.S)
    points = "\n".join(re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S))
    package, info = folder / "my_package", folder / "my_package-1.0.dist-info"
    for made in (package, info):
        made.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in files:
        (package / name).write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    points = points.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(points)
    import rayembed

    platform = str(Path(rayembed.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), platform])}
