"""Requests a second of the served all-MiniLM-L6-v2, with requests embedded together and one by one.

Each side is `jobs/serve_model.py` itself, started anew in each round, in turn. Clients ask for one
text each (one-line descriptions of articles, base64), and ask again as soon as they are answered.
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

from rayembed.pipeline.local_head import free_port
from rayembed.samples.assets import MINILM
from rayembed.samples.files import summaries
from rayembed.samples.references import ScoreSizes

ROOT = Path(__file__).resolve().parents[1]
SIDES = {"one by one": 1, "together": 16_384}
"""Tokens of requests that are embedded together."""
WARM_UP_SECONDS = 2.0


def texts():
    return [a.description for a in summaries(ScoreSizes(), "en") if a.description]


async def measure(url, inputs, clients, seconds):
    """Seconds of each request that was answered within the time, and the server's counts."""
    taken, place = [], iter(range(10**9))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:

        async def counts():
            async with session.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            pairs = [line.partition("{") for line in lines if not line.startswith("#")]
            return {
                name.removeprefix("rayembed_").removesuffix("_total"): int(rest.split()[-1])
                for name, _, rest in pairs
            }

        async def client(end, kept):
            while time.perf_counter() < end:
                text = inputs[next(place) % len(inputs)]
                began = time.perf_counter()
                body = {"model": "minilm", "input": text, "encoding_format": "base64"}
                async with session.post(f"{url}/v1/embeddings", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                kept.append(time.perf_counter() - began)

        async def run(for_seconds, kept):
            end = time.perf_counter() + for_seconds
            await asyncio.gather(*(client(end, kept) for _ in range(clients)))

        await run(WARM_UP_SECONDS, [])
        before, began = await counts(), time.perf_counter()
        await run(seconds, taken)
        lasted, after = time.perf_counter() - began, await counts()
    done = {name: after[name] - before[name] for name in after}
    return lasted, taken, done


def one_side(tokens, inputs, clients, seconds):
    port = free_port()
    command = [sys.executable, "jobs/serve_model.py", "--model", f"minilm={MINILM}"]
    command += ["--port", str(port), "--set", f"models.0.tokens_per_batch={tokens}"]
    command += ["--set", "models.0.threads_per_replica=2"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        while "is served as" not in (line := process.stdout.readline()):
            assert line, "the server ended"
        return asyncio.run(measure(f"http://127.0.0.1:{port}", inputs, clients, seconds))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    inputs = texts()
    print("| round | side | requests/s | median ms | 95 % ms | requests a call of the encoder |")
    print("|---|---|---:|---:|---:|---:|")
    rates = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side, tokens in SIDES.items():
            lasted, taken, done = one_side(tokens, inputs, options.clients, options.seconds)
            rates[side].append(len(taken) / lasted)
            cuts = statistics.quantiles(taken, n=20)
            print(
                f"| {number + 1} | {side} | {rates[side][-1]:.0f} | {1e3 * cuts[9]:.0f} | "
                f"{1e3 * cuts[18]:.0f} | {done['requests'] / max(1, done['batches']):.1f} |",
                flush=True,
            )
    best = {side: max(found) for side, found in rates.items()}
    print(f"\nbest of each side: {best['together'] / best['one by one']:.2f} times as many")


if __name__ == "__main__":
    main()
