"""Loads registered models where nothing is installed but what folders have, and embeds texts.

Started with `python -I -S`, so that neither site-packages nor the checkout are seen. Reads a JSON
mapping from its input and writes one to the file that it names.
"""

import json
import sys
from pathlib import Path

CODE = ("rayembed", "rayembed_extras")


def main(asked):
    told = {"errors": {}, "vectors": {}}
    for kind, (folder, installed) in asked["models"].items():
        if installed not in sys.path:
            sys.path.append(installed)
        import mlflow

        try:
            model = mlflow.pyfunc.load_model(folder)
        except Exception as error:  # noqa: BLE001  rayembed's code is each folder's own
            told["errors"][kind] = repr(error)
            for name in [name for name in sys.modules if name.partition(".")[0] in CODE]:
                del sys.modules[name]
            continue
        told["vectors"][kind] = [
            [
                item["embedding"]
                for item in model.predict({"input": asked["texts"], "role": role})["data"]
            ]
            for role in ("query", "document")
        ]
    import rayembed

    told["code"] = rayembed.__file__
    Path(asked["answer"]).write_text(json.dumps(told))


main(json.load(sys.stdin))
