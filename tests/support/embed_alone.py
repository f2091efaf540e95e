"""Loads registered models where nothing is installed but what a folder has, and embeds texts.

Started with `python -I -S`, so that neither site-packages nor the checkout are seen. Reads a JSON
mapping from its input and writes one to the file that it names.
"""

import json
import sys
from pathlib import Path


def main(asked):
    sys.path.append(asked["lacking"])
    import mlflow

    first = next(iter(asked["models"].values()))
    told = {"error": "", "vectors": {}}
    try:
        mlflow.pyfunc.load_model(first)
    except (ImportError, mlflow.MlflowException) as error:
        told["error"] = repr(error)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rayembed"]:
        del sys.modules[name]
    sys.path.append(asked["rest"])
    for kind, folder in asked["models"].items():
        model = mlflow.pyfunc.load_model(folder)
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
