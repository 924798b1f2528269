"""What stands beside rows, as JSON for programs and people."""

import json

from toolformer_dag.storage.errors import NotPlain


def as_json(owner: str, value: object, sort_keys: bool = False) -> bytes:
    """A line per field. Raises NotPlain, which names `owner`, for a value without a place in JSON."""
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=sort_keys).encode()
    except TypeError as error:
        raise NotPlain(owner, str(error)) from error
