"""A real HTTP server around a small model in plain transformers, on which usual mistakes are made.

It knows nothing of rayembed: tokens, pooling, Dense and length are computed here from the files of
the model's folder, so that right vectors and mistakes have another origin than the proof's.
"""

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from torch import nn


class PlainEmbedder:
    """Vectors of texts by a folder's transformer, pooling, Dense and normalisation."""

    def __init__(self, folder: Path, *, int8: bool = False) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        parts = {one["type"].rpartition(".")[2]: folder / one["path"] for one in modules}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(parts["Transformer"])
        self.model = transformers.AutoModel.from_pretrained(parts["Transformer"]).eval()
        self.length = json.loads((folder / "rayembed.json").read_text())["model"][
            "document_max_length"
        ]
        pooling = json.loads((parts["Pooling"] / "config.json").read_text())
        modes = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
        self.pooling = next(
            pooled for mode, pooled in modes.items() if pooling[f"pooling_mode_{mode}"]
        )
        self.dense = None
        if "Dense" in parts:
            weights = safetensors.torch.load_file(parts["Dense"] / "model.safetensors")
            self.dense = weights["linear.weight"], weights.get("linear.bias")
        stated = json.loads((folder / "config_sentence_transformers.json").read_text())
        self.prompts = stated.get("prompts") or {}
        if int8:
            _round_to_int8(self.model)

    @torch.inference_mode()
    def __call__(
        self, texts: Sequence[str], mistake: str = "", role: str | None = None
    ) -> np.ndarray:
        """(n, D) vectors with a mistake made.

        Args:
            role: whose prompt is put before the texts; None: none.
        """
        if role is not None and mistake != "no prompt":
            other = {"query": "document", "document": "query"}[role]
            prompt = self.prompts.get(other if mistake == "wrong role" else role, "")
            texts = [prompt + text for text in texts]
        if mistake == "lower case":
            texts = [text.lower() for text in texts]
        rows = [self._ids(text, mistake) for text in texts]
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        states = self.model(input_ids=ids, attention_mask=self._attention(mask, mistake))[0].float()
        vectors = self._pooled(states, mask, mistake)
        if self.dense is not None and mistake != "no head":
            vectors = nn.functional.linear(vectors, *self.dense)
        if mistake == "width":
            vectors = vectors[:, :16]
        if mistake != "no normalisation":
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors.numpy()

    def _ids(self, text: str, mistake: str) -> list[int]:
        length = 256 if mistake == "cut at 256" else self.length
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        own = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        place = next(i for i in range(len(whole)) if whole[i : i + len(own)] == own)
        before, behind = whole[:place], whole[place + len(own) :]
        ids = ids[: length - len(before) - len(behind)]
        if mistake == "no EOS":
            behind = []
        if mistake == "double EOS":
            behind = [*behind, *behind]
        if mistake == "no BOS":
            before = []
        if mistake == "double BOS":
            before = [*before, *before]
        return [*before, *ids, *behind]

    def _attention(self, mask: torch.Tensor, mistake: str) -> torch.Tensor:
        if mistake != "causal":
            return mask
        size = mask.shape[1]
        allowed = torch.ones(size, size).tril().bool()[None, None] & mask.bool()[:, None, None]
        return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor, mistake: str) -> torch.Tensor:
        pooling = mistake.removesuffix(" pooling") if mistake.endswith(" pooling") else self.pooling
        if pooling == "cls":
            return states[:, 0]
        if pooling == "last":
            return states[torch.arange(len(states)), mask.sum(1) - 1]
        return (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def _round_to_int8(model: nn.Module) -> None:
    """Round weights by output and activations by token to 8 bits, as int8 products do."""

    def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (values / scale).round().clamp(-127, 127) * scale

    def round_input(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
        scale = arguments[0].abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (rounded(arguments[0], scale), *arguments[1:])

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.data
            layer.weight.data = rounded(weight, weight.abs().amax(1, keepdim=True) / 127)
            layer.register_forward_pre_hook(round_input)


@contextmanager
def mistaken_server(
    embedder: Any, mistake: str = "", *, seen: list[dict[str, Any]] | None = None, fault: Any = None
) -> Iterator[str]:
    """Address of a server with the paths of OpenAI, TEI and Cohere.

    Args:
        seen: gets every request's body, with its path and key.
        fault: function from path, body and vectors to a status and an answer, or None.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            listed = {"data": [{"id": "small", "owned_by": "somebody"}]}
            self._send(200, listed) if self.path == "/v1/models" else self._send(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if seen is not None:
                key = self.headers.get("Authorization")
                seen.append({**body, "path": self.path, "key": key})
            texts = body.get("input") or body.get("inputs") or body.get("texts")
            role = body.get("prompt_name") or body.get("input_type", "").removeprefix("search_")
            vectors = embedder(texts, mistake, role or None)
            answered = fault(self.path, body, vectors) if fault else None
            self._send(*(answered or (200, self._answer(body, vectors))))

        def _answer(self, body: dict[str, Any], vectors: np.ndarray) -> Any:
            if self.path == "/embed":
                return vectors.tolist()
            if self.path == "/v2/embed":
                return {"embeddings": {"float": vectors.tolist()}}
            rows = vectors.tolist()
            if body.get("encoding_format") == "base64":
                rows = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
            listed = [{"index": i, "embedding": row} for i, row in enumerate(rows)]
            return {"object": "list", "data": listed[::-1]}

        def _send(self, status: int, answer: Any) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
