"""The served all-MiniLM-L6-v2 beside a plain server: FastAPI around a SentenceTransformer.

Each side is started anew in each round, in turn; both have two threads of torch. First clients ask
for one text each (one-line descriptions of articles, base64), and again as soon as they are
answered. Then one client asks for 512 longer texts at once, another for one word, again and again.
Run: python benchmarks/serving_speed.py [--clients 64] [--seconds 10] [--rounds 2]
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from rayembed.assets.resolver import resolve_model
from rayembed.machine.hardware import auto_precision
from rayembed.pipeline.run.on_ray import free_port
from rayembed.recipes.sample import MINILM, ScoreSizes
from rayembed_extras.wikipedia_sample.files import summaries

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("served", "plain, float32", "plain, bfloat16")
WARM_UP_SECONDS = 2.0
LARGE = 512
THREADS = 2


class Client:
    """One that asks a server."""

    def __init__(self, session, url):
        self.session, self.url = session, url

    async def ask(self, text):
        """Seconds until the answer was read."""
        began = time.perf_counter()
        body = {"model": "minilm", "input": text, "encoding_format": "base64"}
        async with self.session.post(f"{self.url}/v1/embeddings", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return time.perf_counter() - began

    async def ready(self):
        for _ in range(1200):
            try:
                async with self.session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError("the server did not start")


async def measure(url, short, long, clients, seconds):
    """Seconds of many clients' requests and of all; of a large one, and of words beside it."""
    timeout, limit = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=clients + 1)
    async with aiohttp.ClientSession(connector=limit, timeout=timeout) as session:
        client = Client(session, url)
        await client.ready()
        place = iter(range(10**9))

        async def again(end, kept):
            while time.perf_counter() < end:
                kept.append(await client.ask(short[next(place) % len(short)]))

        async def run(for_seconds):
            began, kept = time.perf_counter(), []
            await asyncio.gather(*(again(began + for_seconds, kept) for _ in range(clients)))
            return kept, time.perf_counter() - began

        await run(WARM_UP_SECONDS)
        many, lasted = await run(seconds)
        large = asyncio.create_task(client.ask(long))
        words = []
        await asyncio.sleep(0.2)
        while not large.done():
            words.append(await client.ask("fox"))
        return many, lasted, await large, words


def command(side, port):
    if side == "served":
        given = ["jobs/serve_model.py", "--model", f"minilm={MINILM}", "--port", str(port)]
        dtype = auto_precision("cpu").dtype  # MiniLM is saved in float32
        changes = (f"threads_per_replica={THREADS}", f"dtype={dtype}")
        return [*given, *(f"--set=models.0.{change}" for change in changes)]
    return ["benchmarks/plain_server.py", resolve_model(MINILM), str(port), side.split()[-1]]


def one_side(side, short, long, clients, seconds):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *command(side, port)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "platform"),
            "OMP_NUM_THREADS": str(THREADS),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return asyncio.run(measure(f"http://127.0.0.1:{port}", short, long, clients, seconds))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    articles = list(summaries(ScoreSizes(), "en"))
    short = [article.description for article in articles if article.description]
    long = [article.extract for article in articles][:LARGE]
    print(
        "| round | side | requests/s | median ms | 99 % ms | 512 texts s | word ms | longest ms |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for number in range(options.rounds):
        for side in SIDES:
            many, lasted, large, words = one_side(
                side, short, long, options.clients, options.seconds
            )
            print(
                f"| {number + 1} | {side} | {len(many) / lasted:.0f} | "
                f"{1e3 * statistics.median(many):.0f} | "
                f"{1e3 * statistics.quantiles(many, n=100)[98]:.0f} | {large:.1f} | "
                f"{1e3 * statistics.median(words):.0f} | {1e3 * max(words):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
