"""Compare serving with `generate` in batches: `python -m benchmarks.serve --config mine/toolformer.toml`.

Tokens that the model wrote per second of a processor core, of this process alone: clients run in another one. The texts
must be equal. Clients ask one after another, each as soon as it has its answer; `--stream` asks for streams.
"""

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import torch
import uvicorn

from toolformer_dag.cli.web_server import bound
from toolformer_dag.computing.plan import lanes
from toolformer_dag.decoding.greedy import generate
from toolformer_dag.model.loading import load_model
from toolformer_dag.serving.server import serving_app
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.training.training_report import finetuned_or_base

CLIENTS = (1, 8, 32)
TOKENS = 40


def prompts(number: int) -> list[str]:
    """Return sums to complete, with and without a call in sight."""
    return [f"Ada had {20 + at} apples and got {3 + at % 7} more, so in total there were" for at in range(number)]


async def ask(address: str, clients: int, texts: list[str], stream: bool) -> list[str]:
    """Ask for all texts; return what was written."""
    waiting = list(enumerate(texts))[::-1]
    found = [""] * len(texts)
    async with httpx.AsyncClient(timeout=600) as http:

        async def client() -> None:
            while waiting:
                at, prompt = waiting.pop()
                asked = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": stream, "calls": "in_text"}
                answer = await http.post(f"{address}/v1/completions", json=asked)
                found[at] = answer.text if stream else answer.json()["choices"][0]["text"]

        await asyncio.gather(*(client() for _ in range(clients)))
    return found


def main() -> None:
    """Print a line per number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--ask", nargs=2, metavar=("ADDRESS", "CLIENTS"), help="be the clients")
    options = parser.parse_args()
    texts = prompts(options.texts)
    if options.ask:
        print(repr(asyncio.run(ask(options.ask[0], int(options.ask[1]), texts, options.stream))))
        return
    torch.set_num_threads(1)
    settings = load_settings(options.config)
    known = [lane.at_inference() for lane in lanes(settings)]
    model = load_model(settings.model, finetuned_or_base(settings))
    decoder = SharedDecoder(model, known, settings)
    with bound(0, "serve") as listening:
        server = uvicorn.Server(uvicorn.Config(serving_app(decoder, "m", None), log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        by_name = {lane.tool.name: lane.tool for lane in known}
        given = {"k": settings.decoding.k, "max_call_tokens": settings.sampling.max_call_tokens}
        for _ in range(2):  # the first loads what the tools need
            begin = time.process_time()
            expected = generate(model, texts, by_name, max_new_tokens=TOKENS, **given)
            alone = sum(one.tokens for one in expected) / (time.process_time() - begin)
        calls = sum(bool(one.calls) for one in expected)
        print(f"generate: {alone:.0f} tokens per CPU-second; {calls} of {len(texts)} texts call a tool")
        for clients in CLIENTS:
            command = [sys.executable, "-m", __spec__.name, "--texts", str(len(texts)), "--ask", address, str(clients)]
            begin = time.process_time()
            done = subprocess.run(
                [*command, *["--stream"] * options.stream], capture_output=True, text=True, check=True
            )
            rate = sum(one.tokens for one in expected) / (time.process_time() - begin)
            equal = options.stream or done.stdout.strip() == repr([one.text for one in expected])
            print(f"{clients} clients: {rate:.0f}, {rate / alone:.2f} of it{'' if equal else '; TEXTS DIFFER'}")


if __name__ == "__main__":
    main()
