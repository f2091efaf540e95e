"""Answers to many clients at once: rayembed's service beside one model call for each request.

Clients ask for one text each and again as soon as they have their answer; then one asks for many
texts while another asks for one again and again. No HTTP is between them, so that Ray and a server
are not needed; `--url` adds a running server with OpenAI's `/v1/embeddings` (Text Embeddings
Inference, vLLM), over HTTP. First the vectors are compared with those in float32.
Run: python -m benchmarks.gpu.serving [--toy] [--clients 256] [--url http://127.0.0.1:8080]
"""

import asyncio
import base64
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from benchmarks.gpu import made_up
from benchmarks.gpu.measuring import arguments, check, device_of, machine_line, print_table

Ask = Callable[[list[str]], Awaitable[np.ndarray]]
"""Vectors of a request's texts."""


def ours(folder: Path, device: torch.device, dtype: str) -> Ask:
    from rayembed.models.loading.load import load_model
    from rayembed_extras.serving.service import EmbeddingService

    service = EmbeddingService("made-up", load_model(folder, dtype=dtype).to(device))

    async def ask(texts: list[str]) -> np.ndarray:
        body = {"model": "made-up", "input": texts, "encoding_format": "base64"}
        answer = await service.answer("/v1/embeddings", body)
        return _read(json.loads(answer.content))

    return ask


def plain(folder: Path, device: torch.device, dtype: str) -> Ask:
    """What one writes by oneself: a model call for each request, one after the other."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(folder), device=str(device), model_kwargs={"dtype": getattr(torch, dtype)}
    )
    thread = ThreadPoolExecutor(1)

    def encode(texts: list[str]) -> np.ndarray:
        return model.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    async def ask(texts: list[str]) -> np.ndarray:
        return await asyncio.get_running_loop().run_in_executor(thread, encode, texts)

    return ask


def over_http(url: str, clients: int) -> Ask:
    """A server's answers."""
    threads = ThreadPoolExecutor(clients + 2)

    def post(texts: list[str]) -> np.ndarray:
        body = json.dumps({"model": "made-up", "input": texts, "encoding_format": "base64"})
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/embeddings",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return _read(json.load(answer))

    async def ask(texts: list[str]) -> np.ndarray:
        return await asyncio.get_running_loop().run_in_executor(threads, post, texts)

    return ask


def _read(body: dict) -> np.ndarray:
    """(N, D) float32, from base64 or plain numbers."""
    found = [one["embedding"] for one in body["data"]]
    rows = [np.frombuffer(base64.b64decode(x), "<f4") if isinstance(x, str) else x for x in found]
    return np.array(rows, dtype=np.float32)


async def measure(
    ask: Ask, short: list[str], long: list[str], clients: int, lasting: float
) -> list[str]:
    """Requests a second, their median and 99th percentile, seconds of a large request, and median
    milliseconds of small ones beside it.
    """

    async def again(end: float, kept: list[float], first: int) -> None:
        place = first
        while time.perf_counter() < end:
            began = time.perf_counter()
            await ask([short[place % len(short)]])
            kept.append(time.perf_counter() - began)
            place += clients

    async def run(seconds: float) -> tuple[list[float], float]:
        began, kept = time.perf_counter(), []
        end = began + seconds
        await asyncio.gather(*(again(end, kept, client) for client in range(clients)))
        return kept, time.perf_counter() - began

    await run(lasting / 4)
    many, lasted = await run(lasting)

    async def at_once() -> float:
        began = time.perf_counter()
        await ask(long)
        return time.perf_counter() - began

    large, words = asyncio.create_task(at_once()), []
    await asyncio.sleep(0)
    while not large.done():
        began = time.perf_counter()
        await ask([short[0]])
        words.append(time.perf_counter() - began)
    return [
        f"{len(many) / lasted:,.0f}",
        f"{1e3 * statistics.median(many):.1f}",
        f"{1e3 * float(np.quantile(many, 0.99)):.1f}",
        f"{await large:.2f}",
        f"{1e3 * statistics.median(words):.1f}",
    ]


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--large", type=int, default=512, help="texts of the large request")
    parser.add_argument("--url", help="of a running server with the same interface")
    options = parser.parse_args(given)
    if options.toy:
        options.clients, options.seconds, options.large = 4, 0.4, 20
    device = device_of(options.toy)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    shape = made_up.TOY_ENCODER if options.toy else made_up.published_shape(made_up.BERT_BASE)
    vocabulary = int(shape["vocab_size"])
    short = [query for query, _ in made_up.pairs(1000, vocabulary)]
    long = made_up.documents(options.large, vocabulary, longest=40 if options.toy else 512)
    print(machine_line(device))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = made_up.model_folder(Path(name), shape, device, dtype)
        exact = asyncio.run(plain(folder, device, "float32")(short[:8]))
        sides = {
            "rayembed": ours(folder, device, dtype),
            "a call for each request": plain(folder, device, dtype),
        }
        for side, ask in sides.items():
            least = float((asyncio.run(ask(short[:8])) * exact).sum(1).min())
            needed = 0.98 if dtype == "bfloat16" else 0.9999
            check(least > needed, f"{side}: cosine to float32 at least {least:.4f}")
        if options.url:
            sides[options.url] = over_http(options.url, options.clients)
        for side, ask in sides.items():
            figures = asyncio.run(measure(ask, short, long, options.clients, options.seconds))
            rows.append([side, *figures])
    print(f"\n{options.clients} clients; the large request has {options.large} texts\n")
    heads = ["side", "requests/s", "median ms", "99 % ms", "large s", "small beside it ms"]
    print_table(heads, rows)


if __name__ == "__main__":
    main()
