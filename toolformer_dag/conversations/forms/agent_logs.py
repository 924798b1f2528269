"""Forms of steps of agents: ATIF, smolagents, the agent data protocol."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import find_first_value
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult


def renumber_steps(record: dict[str, Any], original_record: Any) -> dict[str, Any]:
    """Number the steps of a record of ATIF, a format of agent trajectories, anew from 1, and correct their count.

    This is needed after calls have been dropped. Steps without a number and metrics without a count stay as they are.

    Args:
        record: What is left of the record.
        original_record: The record with all its calls, which is not needed here.
    """
    steps = record.get("steps")
    if not isinstance(steps, list):
        return record

    numbered_steps = [_replace_step_number(step, step_number) for step_number, step in enumerate(steps, start=1)]
    changed_record = {**record, "steps": numbered_steps}
    if "final_metrics" in record:
        changed_record["final_metrics"] = _replace_step_count(record["final_metrics"], len(steps))
    return changed_record


def _replace_step_number(step: Any, step_number: int) -> Any:
    """Copy a step with another number. A step without a number is returned unchanged."""
    has_number = isinstance(step, Mapping) and step.get("step_id") is not None
    return {**step, "step_id": step_number} if has_number else step


def _replace_step_count(metrics: Any, step_count: int) -> Any:
    """Copy the metrics of a run with another count of steps. Metrics without a count are returned unchanged."""
    has_count = isinstance(metrics, Mapping) and metrics.get("total_steps") is not None
    return {**metrics, "total_steps": step_count} if has_count else metrics


def iter_smolagents_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages, calls and results of the steps of an agent of smolagents."""
    steps_path: RecordPath = ("steps",) if isinstance(record, Mapping) else ()
    for step_index, step in enumerate(get_value_at(record, steps_path)):
        if isinstance(step, Mapping):
            yield from _iter_step_messages(step, (*steps_path, step_index))


def _iter_step_messages(step: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the messages of a step.

    They are the task, if the step has it, and then the final answer or else the words, the calls and their result.
    """
    yield from _iter_task_messages(step, path)

    final_answer = _find_final_answer(step)
    if final_answer is None:
        yield from _iter_action_messages(step, path)
    else:
        answer_path = (*path, "tool_calls", 0, "function", "arguments", "answer")
        yield StoredMessage(answer_path, final_answer, "assistant")


def _iter_task_messages(step: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the system prompt and the task in a step, which the first steps of a run have."""
    for key, role in (("system_prompt", "system"), ("task", "user")):
        if isinstance(step.get(key), str):
            yield StoredMessage((*path, key), step[key], role)


def _find_final_answer(step: Mapping[str, Any]) -> str | None:
    """Find the final answer of a run, which smolagents writes as a call of the tool `final_answer`.

    Returns:
        The answer, or None if the first call of the step is no such call, or its answer is no text.
    """
    calls = step.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return None

    first_call = calls[0]
    if find_first_value(first_call, ("function.name",)) != "final_answer":
        return None
    answer = find_first_value(first_call, ("function.arguments.answer",))
    return answer if isinstance(answer, str) else None


def _iter_action_messages(step: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the words of the model in a step, its calls, and their result."""
    words = step.get("model_output")
    calls = step.get("tool_calls")
    # Blank words count only if the step makes no call.
    has_words = isinstance(words, str) and (bool(words.strip()) or not calls)
    if has_words:
        yield StoredMessage((*path, "model_output"), words, "assistant")
    if calls:
        yield StoredMessage(path, {"role": "assistant", "tool_calls": calls})
        yield from _iter_result_messages(step, path)


def _iter_result_messages(step: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the observation of a step as a result, or else its error, if it has either."""
    error = find_first_value(step, ("error.message", "error"))
    status_fields = None if error is None else {"error": error}

    observation = step.get("observations")
    if observation is not None:
        result = FoundResult(observation, status_fields=status_fields)
        yield StoredMessage((*path, "observations"), observation, result=result)
    elif error is not None:
        result = FoundResult(error, status_fields=status_fields)
        yield StoredMessage((*path, "error"), error, result=result)


def iter_adp_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the actions and observations of a record of the agent data protocol."""
    for item_index, item in enumerate(record["content"]):
        if isinstance(item, Mapping):
            yield _parse_adp_item(item, ("content", item_index))


def _parse_adp_item(item: Mapping[str, Any], path: RecordPath) -> StoredMessage:
    """Convert an item of a record to a message.

    An action is a call or words of the assistant. An observation is words of the user or a result.
    """
    call = _parse_adp_call(item)
    if call is not None:
        return StoredMessage(path, item, call=call)
    if item.get("class_") == "message_action":
        return StoredMessage(path, str(item.get("content")), "assistant")
    return _parse_adp_observation(item, path)


def _parse_adp_observation(item: Mapping[str, Any], path: RecordPath) -> StoredMessage:
    """Convert an observation to a message.

    A text of the user is words. Any other observation, such as a web page, is a result.
    """
    content = item.get("content")
    if item.get("source") == "user" and isinstance(content, str):
        return StoredMessage(path, content, "user")

    if content is None:  # a web page
        content = item.get("html") or item.get("axtree")
    return StoredMessage(path, item, result=FoundResult(content))


def _parse_adp_call(item: Mapping[str, Any]) -> FoundCall | None:
    """Parse an item that calls a function or runs code.

    Returns:
        The call, or None for any other item. Code is a call of a tool that is named after its language.
    """
    item_class = item.get("class_")
    if item_class == "api_action":
        return FoundCall(str(item.get("function")), item.get("kwargs"), id=None)
    if item_class == "code_action":
        language = str(item.get("language") or "code")
        return FoundCall(language, {"code": item.get("content")}, id=None)
    return None


FORMS = (
    Form(
        name="ATIF",
        source="https://harborframework.com/docs/agents/trajectory-format",
        signs=("steps.*.source", "steps.*.observation.results"),
        messages=("steps",),
        after_drop=renumber_steps,
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
        read=iter_smolagents_messages,
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
        read=iter_adp_messages,
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
