"""vLLM gives the rows of transformers: numbers and texts of tiny models, and all tables of a whole line."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Timer

import httpx
import pytest
import torch
from openai import OpenAI
from polars.testing import assert_frame_equal
from transformers import (
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from tests.agreement import answers, assert_same_numbers
from tests.decoding.test_call_form import Flights
from tests.decoding.test_markers import FORMS, tokenizer_with
from tests.runs.conftest import World
from tests.tiny_models import tokenizer_of
from tests.worlds import lay_out, make_model
from toolformer_dag.computing.update import update_table
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_local_processes_executor
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.weights import ModelError
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.tools.options import ToolOptions

pytest.importorskip("vllm", reason="vLLM lies in an environment of its own: make test-vllm")
from toolformer_dag.model.vllm_service import ServedVllm

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
OPTIONS = {"enforce_eager": True, "block_size": 32}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "GPT-2": (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "Llama": (LlamaConfig, SIZES),
    "Qwen 3": (Qwen3Config, SIZES),
    "GPT-J": (GPTJConfig, {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "rotary_dim": 16}),
    "Mixtral": (MixtralConfig, {**SIZES, "num_local_experts": 4}),
}


def saved_model(folder: Path, shape: str, tokenizer: PreTrainedTokenizerBase) -> str:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config, sizes = SHAPES[shape]
    AutoModelForCausalLM.from_config(config(vocab_size=len(tokenizer) + 6, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def both(name: str, markers: CallMarkers = PAPER_MARKERS, **options: object) -> list[Engine]:
    """Load a model in each engine; `options` are vLLM's."""
    torch.set_num_threads(1)
    mine = ModelSettings(name=name, device="cpu", dtype="float32", markers=markers)
    theirs = mine.model_copy(update={"engine": "vllm", "vllm": OPTIONS, **options})
    return [Engine(load_model(mine)), Engine(load_model(theirs))]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [("GPT-2", "merged"), ("Llama", "bytes"), ("Qwen 3", "prepended"), ("Mixtral", "bos"), ("GPT-J", "merged")],
)
def test_proposals_losses_perplexity_and_answers_are_those_of_transformers(shape, tokens, tmp_path):
    assert_same_numbers(both(saved_model(tmp_path, shape, tokenizer_of(tokens))))


@pytest.mark.parametrize("form", ["special", "one"])
def test_calls_in_other_markers_and_with_named_arguments_are_those_of_transformers(form, tmp_path):
    engines = both(saved_model(tmp_path, "Llama", tokenizer_with(form)), FORMS[form])
    assert_same_numbers(engines)
    tool = Flights("flights", ToolOptions(), "")
    prompts = [f"Ada had {at} apples" + " and more" * (at % 3) for at in range(24)]
    results: list[str | None] = []
    for most in (16, 60):
        one, other = (answers(engine, prompts, 40, tool, most) for engine in engines)
        assert one == other
        results += [call.result for _, calls in one for call in calls]
    assert None in results and any(results)  # some are cut off, and some validate


def test_a_server_gives_the_numbers_of_transformers_over_http(tmp_path):
    name = saved_model(tmp_path, "Llama", tokenizer_of("merged"))
    with served(
        name, "--logits-processors", "toolformer_dag.model.vllm_streams:Streams", "--max-logprobs", "65"
    ) as url:
        engines = both(name, url=(url,))
        assert_same_numbers(engines)
        assert all(engine.token_counts.samples > 0 for engine in engines)
        with pytest.raises(ModelError, match=f"model.url: {url} serves {name}, not .*other; start it with VLLM_"):
            ServedVllm([url], str(tmp_path / "other"), "float32", 1)
    with pytest.raises(ModelError, match=f"model.url: {url}/v1/models does not answer .*ConnectError"):
        ServedVllm([url], name, "float32", 1)


@contextmanager
def served(name: str, *options: str) -> Iterator[str]:
    """Run `vllm serve` and yield its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` asks for the package `vllm`
    command = [*program, "--model", name, "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--enforce-eager",
        "--block-size",
        "32",
        "--dtype",
        "float32",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        *options,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            while server.poll() is None:
                with suppress(httpx.TransportError):
                    httpx.get(f"{url}/health").raise_for_status()
                    break
                time.sleep(0.5)
            yield url
        finally:
            with suppress(ProcessLookupError):  # it ended by itself: its output says why
                os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose model vLLM can run, annotated by transformers."""
    folder = tmp_path_factory.mktemp("line")
    world = World(lay_out(folder / "world", make_model(folder / "made", heads=5, width=320)))
    world.run(training=True)
    return world


def test_answers_with_calls_are_those_of_transformers_also_where_many_tokens_are_equally_likely(line):
    prompts = [f" {a} and {b} make {a + b} . {b} and {a}" for a in range(8) for b in range(4)]
    one, other = (answers(engine, prompts, 10) for engine in both(str(line.folder / "model")))
    assert one == other
    assert sum(bool(calls) for _, calls in one) > 10


IN_VLLM = ('model.engine="vllm"', "model.vllm.enforce_eager=true", "model.vllm.block_size=32")


def test_a_line_in_vllm_has_the_rows_of_a_line_in_transformers(line, tmp_path):
    other = World(lay_out(tmp_path / "other", line.folder / "model"))
    other.run(*IN_VLLM, training=True)
    ours = line.tables()
    theirs = other.tables()
    assert ours.keys() == theirs.keys()
    for name, rows in ours.items():
        assert_frame_equal(rows, theirs[name], abs_tol=1e-4, rel_tol=1e-4)
    losses = other.lake.get_table("calculator/loss_deltas")
    assert all(losses.read_pointer(part).record["backends"][0].startswith("vllm ") for part in losses.list_part_names())
    assert other.stale() == []  # the engine is in no fingerprint


def test_a_worker_that_is_killed_in_the_middle_of_a_chunk_changes_no_row(line, tmp_path, caplog):
    other = World(lay_out(tmp_path / "other", line.folder / "model"))
    plan = other.project(*IN_VLLM, "execution.chunk_texts=16").plan
    tables = {output.name: output for output in list_table_outputs(plan)}
    worker = Worker(plan)
    timers = list[Timer]()

    def kill_soon(done: int, total: int) -> None:
        if done < total and not timers:  # the next chunk begins when this returns
            [child] = multiprocessing.active_children()
            timers.append(Timer(0.2, os.kill, (child.pid, signal.SIGKILL)))
            timers[0].start()

    workers = Workers(worker, tables, partial(build_local_processes_executor, 1, list_table_outputs))
    try:
        for output in tables.values():
            asks = output.stage.name == "scored_candidates"
            update_table(worker, workers, output, kill_soon if asks else lambda done, total: None)
    finally:
        workers.close()
    assert timers and "another worker gets the chunk" in caplog.text
    expected = line.tables()
    for name, rows in other.tables().items():
        assert_frame_equal(rows, expected[name], abs_tol=1e-4, rel_tol=1e-4)


def test_two_clients_of_a_server_in_vllm_get_what_generate_writes_in_transformers(tmp_path):
    folder = lay_out(tmp_path / "world", make_model(tmp_path / "made", heads=5, width=320))
    prompts = [f" {a} and {b} make {a + b} . {b} and {a}" for a in range(2) for b in range(8)]
    (folder / "asked.jsonl").write_text("".join(f"{json.dumps({'text': prompt})}\n" for prompt in prompts))
    program = [sys.executable, "-m", "toolformer_dag.cli"]
    started = {"cwd": folder, "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, "text": True}
    asked = [*program, "generate", "asked.jsonl", "--model", "base", "--max-new-tokens", "20"]
    lines = subprocess.run(asked, check=True, stdout=subprocess.PIPE, **started).stdout.splitlines()
    expected = [json.loads(line)["text"] for line in lines]
    overrides = [part for setting in IN_VLLM for part in ("--set", setting)]
    command = [*program, "serve", "--model", "base", "--port", "0", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **started) as server:
        try:
            address = next(line.split(" at ")[1].split()[0] for line in server.stdout if line.startswith("base at "))
            ask = OpenAI(base_url=address, api_key="none").completions.create

            def written(prompt: str) -> str:
                [choice] = ask(model="base", prompt=prompt, max_tokens=20, extra_body={"calls": "in_text"}).choices
                return prompt + choice.text

            with ThreadPoolExecutor(2) as clients:
                assert list(clients.map(written, prompts)) == expected
        finally:
            os.killpg(server.pid, signal.SIGINT)
            server.communicate(timeout=120)
    assert server.returncode == 0


def test_what_vllm_does_not_take_is_refused_in_a_sentence(tmp_path):
    name = saved_model(tmp_path, "Llama", tokenizer_of("merged"))

    def refused(**options: object) -> str:
        with pytest.raises(ModelError) as error:
            load_model(ModelSettings(name=name, device="cpu", engine="vllm", vllm=options))
        return str(error.value)

    assert "model.vllm.max_num_sequences: vLLM" in refused(max_num_sequences=4)
    assert "did you mean 'max_num_seqs'?" in refused(max_num_sequences=4)
    assert "model.vllm.dtype follows from [model]" in refused(dtype="half")
    assert 'set model.engine = "transformers"' in refused(block_size=7, enforce_eager=True)
    with pytest.raises(ModelError, match="no GPT-J with tied embeddings"):
        load_model(ModelSettings(engine="vllm"))
