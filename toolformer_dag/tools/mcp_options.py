"""The options of an MCP tool: how its server is reached, and what a call of it looks like."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from toolformer_dag.identity import fingerprint
from toolformer_dag.tools.options import (
    MAX_TIMEOUT_SECONDS,
    LinearPattern,
    OptionPath,
    ToolOptions,
    WebAddress,
    list_url_secrets,
    mask_secrets,
    mask_url,
)

MAX_MESSAGE_CHARACTERS = 300
"""The most characters of an error that a message repeats; a breach of the protocol is described at length."""


class McpOptions(ToolOptions):
    """A tool of a server of `[servers.NAME]`, whose keys these are too.

        [servers.office]
        command = ["python", "weather_server.py"]        # or url = "http://localhost:8000/mcp"

        [tools.get_weather]                              # as the server calls it
        name = "Weather"
        examples = ['It is [Weather(city="Rome")] sunny in Rome.', 'Oslo is at [Weather(city="Oslo", days=2)] -3 °C.']

    Values of environment variables never enter settings or fingerprints. Of `command` and `url`, records and messages
    show the program and the plain address; the rest is replaced by its hash.

    Attributes:
        server: The name of the server, NAME of `[servers.NAME]`.
        tool: The server's name for the tool.
        name: The tool's name in texts. By default get_weather is GetWeather.
        input_schema: The JSON schema of the tool's arguments, as the server lists it.
        command: Program and arguments of a server over stdio (standard input and output), which is started in `cwd`.
        cwd: The folder in which the command is started.
        url: The address of a server over streamable HTTP.
        result: How a result that is an object is shown, such as "{temperature} °C". By default it is compact JSON.
        wants: A regular expression that a text must contain; by default every text is annotated. It is matched in
            linear time, so it has no look-around and no backreferences.
        env: The names of the environment variables that are passed to the command.
        token_env: The environment variable that holds a bearer token for the url.
        start_timeout_s: The limit for each request of the handshake after the first, to which the SDK gives 10 s. It
            includes the start of a command. Listing the tools counts as a single request. The section's timeout_s
            limits calls only.
        version: Changed when the server's answers change, so that calls are executed again.
    """

    server: str
    tool: str
    name: str = Field("", pattern=r"^([^\W\d]\w*)?$")
    input_schema: Mapping[str, Any] = Field(default_factory=dict)
    command: tuple[str, ...] | None = Field(None, min_length=1)
    cwd: OptionPath = Field(Path(), validate_default=True)
    url: WebAddress | None = None
    result: str | None = None
    wants: LinearPattern | None = None
    env: tuple[str, ...] = ()
    token_env: str | None = None
    start_timeout_s: float = Field(20.0, gt=0, le=MAX_TIMEOUT_SECONDS)
    version: str = "1"

    @model_validator(mode="after")
    def _require_single_connection(self) -> "McpOptions":
        """Check that either `command` or `url` is set.

        Raises:
            ValueError: Both or neither are.
        """
        if (self.command is None) == (self.url is None):
            raise ValueError(
                f"[servers.{self.server}] needs either command = [...] (stdio) or url = ... (HTTP), not both"
            )
        return self

    @property
    def masked_connection(self) -> str:
        """The server for records and messages: its program or plain address, and a hash of the rest.

        Arguments of a command and parts of a URL may be secrets.
        """
        if self.command is None:
            return mask_url(self.url or "")

        program, *arguments = self.command
        if not arguments:
            return program
        return f"{program} (its arguments are {fingerprint(arguments)})"

    def format_masked_error(self, error: BaseException) -> str:
        """Return the message of an error on one line of at most MAX_MESSAGE_CHARACTERS, with `***` for secrets."""
        message = mask_secrets(self._list_secrets(), str(error))
        return " ".join(message.split())[:MAX_MESSAGE_CHARACTERS]

    def _list_secrets(self) -> list[str]:
        """List what may be secret in the options: arguments of the command, parts of the URL, and variables' values."""
        variable_names = list(self.env)
        if self.token_env:
            variable_names.append(self.token_env)

        secrets = list(self.command or ())[1:]  # without the program
        secrets += list_url_secrets(self.url or "")
        secrets += [os.environ.get(name, "") for name in variable_names]
        return secrets
