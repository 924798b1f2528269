"""How the server of a section is reached."""

import os
from typing import TYPE_CHECKING

from toolformer_dag.tools.mcp.options import McpOptions
from toolformer_dag.tools.tool import ToolDown

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from mcp.client import Transport


def transport(key: str, options: McpOptions) -> "Transport | StdioServerParameters | str":
    """What `mcp.Client` takes: a command with its environment, a url, or a url with a bearer token.

    A command sees the variables that the SDK lets through (PATH, HOME, ...) and those that `env` names. Raises ToolDown
    for a variable that is not set.
    """
    if options.command is not None:
        from mcp import StdioServerParameters

        program, *arguments = options.command
        environment = {name: _variable(key, name) for name in options.env}
        return StdioServerParameters(command=program, args=arguments, env=environment, cwd=options.cwd)
    url = options.url or ""
    return url if options.token_env is None else _with_token(url, _variable(key, options.token_env))


def _with_token(url: str, token: str) -> "Transport":
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    client = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=httpx2.Timeout(30.0, read=300.0))
    return streamable_http_client(url, http_client=client)


def _variable(key: str, name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ToolDown(f"[tools.{key}]: the variable {name} is not set; export it, or take it out of the section")
    return value
