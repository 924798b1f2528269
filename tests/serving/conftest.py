"""A server over the embedded model, in a thread of this process."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.decoded import generate
from toolformer_dag.cli.connections import build_server_config
from toolformer_dag.cli.web_server import LOOPBACK_HOSTS, SameOriginGuard, open_listening_socket
from toolformer_dag.computing.plan import Lane, load_lanes
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.serving.server import build_serving_app
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings

SUM = "Jack had 17 nails and bought 25 more. In total he has"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


class Served:
    """The embedded model with its tools, and servers over it."""

    def __init__(self, folder: Path) -> None:
        (folder / "toolformer.toml").write_text("[tools.calculator]\n[tools.calendar]\n")
        self.settings: Settings = load_settings(folder / "toolformer.toml")
        self.lanes: list[Lane] = [lane.build_inference_lane() for lane in load_lanes(self.settings)]
        self.model: LanguageModel = load_model(self.settings.model)
        self.model.tokenizer.chat_template = TEMPLATE

    def expected(self, prompts: Sequence[str], **options: Any) -> list[Any]:
        """What `generate` writes."""
        given: dict[str, Any] = {
            "top_k": self.settings.decoding.k,
            "max_new_tokens": self.settings.decoding.max_new_tokens,
            "max_call_tokens": self.settings.sampling.max_call_tokens,
        }
        tools = {lane.tool.name: lane.tool for lane in self.lanes}
        return generate(self.model, prompts, tools, **{**given, **options})

    @contextmanager
    def server(
        self, key: str | None = None, calculator: Any = None, serving: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[str, SharedDecoder]]:
        """Serve until the block ends; yield the address and the decoder. `calculator`: a tool in its place."""
        known = [
            replace(lane, tool=calculator) if calculator and lane.key == "calculator" else lane for lane in self.lanes
        ]
        limits = self.settings.serving.model_copy(update=dict(serving or {}))
        decoder = SharedDecoder(self.model, known, self.settings.model_copy(update={"serving": limits}))
        with open_listening_socket(0, "serve") as listening:
            port = listening.getsockname()[1]
            app = SameOriginGuard(build_serving_app(decoder, "embedded", key), port, LOOPBACK_HOSTS)
            server = uvicorn.Server(build_server_config(app))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            try:
                yield f"http://127.0.0.1:{port}", decoder
            finally:
                server.should_exit = True
                thread.join()
        assert not decoder.is_alive


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))
