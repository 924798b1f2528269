"""Steps of agents in forms that are no framework's messages: ATIF, smolagents, the agent data protocol."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import first_of
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall, FoundResult


def numbered_steps(record: dict[str, Any], before: Any) -> dict[str, Any]:
    """Return what is left of a record of ATIF, with steps that are numbered from 1 without a gap, and counted anew.

    Only numbers that were there are changed. before: the record as it was; it is not needed here.
    """
    steps = record.get("steps")
    if not isinstance(steps, list):
        return record
    numbered = []
    for number, step in enumerate(steps, 1):
        has_number = isinstance(step, Mapping) and step.get("step_id") is not None
        numbered.append({**step, "step_id": number} if has_number else step)
    changed = {**record, "steps": numbered}
    metrics = record.get("final_metrics")
    if isinstance(metrics, Mapping) and metrics.get("total_steps") is not None:
        changed["final_metrics"] = {**metrics, "total_steps": len(steps)}
    return changed


def smolagents_steps(record: Any) -> Iterator[StoredMessage]:
    """Yield the steps of an agent of smolagents: a task, or what was written, called and observed."""
    steps = record["steps"] if isinstance(record, Mapping) else record
    steps_path: Path = ("steps",) if isinstance(record, Mapping) else ()
    for number, step in enumerate(steps):
        if not isinstance(step, Mapping):
            continue
        path: Path = (*steps_path, number)
        for key, role in (("system_prompt", "system"), ("task", "user")):
            if isinstance(step.get(key), str):
                yield StoredMessage((*path, key), step[key], role)
        final_answer = _final_answer(step)
        if final_answer is not None:
            answer_path = (*path, "tool_calls", 0, "function", "arguments", "answer")
            yield StoredMessage(answer_path, final_answer, "assistant")
        else:
            yield from _smolagents_action(step, path)


def _final_answer(step: Mapping[str, Any]) -> str | None:
    """Return the answer with which a step ends the run, which smolagents writes as a call; None for another step."""
    calls = step.get("tool_calls")
    first_call = calls[0] if isinstance(calls, list) and calls else None
    answer = first_of(first_call, ("function.arguments.answer",))
    is_final = first_of(first_call, ("function.name",)) == "final_answer"
    return answer if is_final and isinstance(answer, str) else None


def _smolagents_action(step: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield what the model wrote in a step, its calls, and what it observed, or the error, as their result."""
    words = step.get("model_output")
    calls = step.get("tool_calls")
    if isinstance(words, str) and (words.strip() or not calls):
        yield StoredMessage((*path, "model_output"), words, "assistant")
    if not calls:
        return
    yield StoredMessage(path, {"role": "assistant", "tool_calls": calls})
    observation = step.get("observations")
    error = first_of(step, ("error.message", "error"))
    failure = None if error is None else {"error": error}
    if observation is not None:
        yield StoredMessage(
            (*path, "observations"), observation, result=FoundResult(observation, status_fields=failure)
        )
    elif error is not None:
        yield StoredMessage((*path, "error"), error, result=FoundResult(error, status_fields=failure))


def adp_items(record: Any) -> Iterator[StoredMessage]:
    """Yield the items of the agent data protocol: actions of the agent, and observations of users and environments."""
    for number, item in enumerate(record["content"]):
        if isinstance(item, Mapping):
            yield _adp_item(item, ("content", number))


def _adp_item(item: Mapping[str, Any], path: Path) -> StoredMessage:
    """Return an action as a call or as words, an observation as words of the user or as a result."""
    kind = item.get("class_")
    content = item.get("content")
    if kind == "api_action":
        return StoredMessage(path, item, call=FoundCall(str(item.get("function")), item.get("kwargs"), id=None))
    if kind == "code_action":
        language = str(item.get("language") or "code")
        return StoredMessage(path, item, call=FoundCall(language, {"code": content}, id=None))
    if kind == "message_action":
        return StoredMessage(path, str(content), "assistant")
    if item.get("source") == "user" and isinstance(content, str):
        return StoredMessage(path, content, "user")
    observed = content if content is not None else item.get("html") or item.get("axtree")
    return StoredMessage(path, item, result=FoundResult(observed))


FORMS = (
    Form(
        name="ATIF",
        source="https://harborframework.com/docs/agents/trajectory-format",
        signs=("steps.*.source", "steps.*.observation.results"),
        messages=("steps",),
        after_drop=numbered_steps,
        example={
            "schema_version": "ATIF-v1.7",
            "steps": [
                {"step_id": 1, "source": "user", "message": "How warm is it in Oslo?"},
                {
                    "step_id": 2,
                    "source": "agent",
                    "message": "",
                    "tool_calls": [{"tool_call_id": "c1", "function_name": "weather", "arguments": {"city": "Oslo"}}],
                    "observation": {"results": [{"source_call_id": "c1", "content": "7 degrees"}]},
                },
                {"step_id": 3, "source": "agent", "message": "It is 7 degrees in Oslo."},
            ],
        },
    ),
    Form(
        name="smolagents steps",
        source="https://huggingface.co/docs/smolagents/reference/agents",
        signs=("steps.*.observations", "steps.*.task", "steps.*.model_output", "*.model_input_messages"),
        read=smolagents_steps,
        example={
            "steps": [
                {"task": "How warm is it in Oslo?"},
                {
                    "step_number": 1,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": {"city": "Oslo"}},
                        }
                    ],
                    "observations": "7 degrees",
                },
                {"step_number": 2, "model_output": "It is 7 degrees in Oslo."},
            ]
        },
    ),
    Form(
        name="Agent data protocol",
        source="https://www.agentdataprotocol.com/",
        signs=("content.*.class_",),
        read=adp_items,
        example={
            "id": "1",
            "content": [
                {"class_": "text_observation", "content": "How warm is it in Oslo?", "source": "user"},
                {"class_": "api_action", "function": "weather", "kwargs": {"city": "Oslo"}},
                {"class_": "text_observation", "content": "7 degrees", "source": "environment"},
                {"class_": "message_action", "content": "It is 7 degrees in Oslo."},
            ],
        },
    ),
)
