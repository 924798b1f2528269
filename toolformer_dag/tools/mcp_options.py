"""The options of an MCP tool: how its server is reached, and what a call of it looks like."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from toolformer_dag.identity import fingerprint
from toolformer_dag.tools.options import (
    MAX_SECONDS,
    LinearPattern,
    OptionPath,
    ToolOptions,
    WebAddress,
    list_url_secrets,
    mask_url,
    without_secrets,
)

MESSAGE_CHARACTERS = 300
"""The most characters of an error that a message repeats; a breach of the protocol is described at length."""


class McpOptions(ToolOptions):
    """A tool of a server of `[servers.NAME]`, whose keys these are too.

        [servers.office]
        command = ["python", "weather_server.py"]        # or url = "http://localhost:8000/mcp"

        [tools.get_weather]                              # as the server calls it
        name = "Weather"
        examples = ['It is [Weather(city="Rome")] sunny in Rome.', 'Oslo is at [Weather(city="Oslo", days=2)] -3 °C.']

    - tool: the server's name for it. name: the name in the text; by default get_weather is GetWeather.
    - input_schema, description: as the server lists them; a description here replaces its own.
    - command: program and arguments of a stdio server, started in `cwd`. url: the address of a streamable HTTP server.
    - result: how a result that is an object is shown, as in "{temperature} °C"; by default as compact JSON.
    - wants: a regular expression that a text must contain; by default every text is annotated. It is matched in linear
      time, so it has no look-around and no backreferences.
    - env: names of environment variables passed to the command. token_env: the variable that holds a bearer token for
      the url. Values of variables never enter settings or fingerprints. Of `command` and `url`, records and messages
      show the program and the plain address; the rest is replaced by its hash.
    - start_timeout_s: the limit for each request of the handshake after the first, to which the SDK gives 10 s. It
      includes the start of a command. Listing the tools counts as a single request. The section's timeout_s limits
      calls only.
    - version: change it when the server's answers change, so that calls are executed again.
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
    start_timeout_s: float = Field(20.0, gt=0, le=MAX_SECONDS)
    version: str = "1"

    @model_validator(mode="after")
    def _one_connection(self) -> "McpOptions":
        if (self.command is None) == (self.url is None):
            raise ValueError(
                f"[servers.{self.server}] needs either command = [...] (stdio) or url = ... (HTTP), not both"
            )
        return self

    @property
    def shown(self) -> str:
        """The server for records and messages: its program or plain address, and a hash of the rest.

        Arguments of a command and parts of a URL may be secrets.
        """
        if self.command is None:
            return mask_url(self.url or "")
        program, *arguments = self.command
        return f"{program} (its arguments are {fingerprint(arguments)})" if arguments else program

    def public(self, error: BaseException) -> str:
        """Return the message of an error on one line of at most MESSAGE_CHARACTERS, with `***` for secrets."""
        message = without_secrets(self._list_secrets(), str(error))
        return " ".join(message.split())[:MESSAGE_CHARACTERS]

    def _list_secrets(self) -> list[str]:
        """Return the arguments of the command, the secrets in the URL, and the values of environment variables."""
        variables = [*self.env, self.token_env] if self.token_env else self.env
        secrets = list(self.command or ())[1:]
        secrets += list_url_secrets(self.url or "")
        secrets += [os.environ.get(name, "") for name in variables]
        return secrets
