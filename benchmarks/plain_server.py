"""The server that one writes by oneself: FastAPI around a SentenceTransformer.

Run: python benchmarks/plain_server.py FOLDER PORT DTYPE
"""

import base64
import sys

import uvicorn
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer


def main(folder, port, dtype):
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embeddings(body: dict):
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        made = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
        data = [{"object": "embedding", "index": i, "embedding": e} for i, e in enumerate(made)]
        return {"object": "list", "data": data}

    @app.get("/health")
    def health():
        return {"status": "ready"}

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
