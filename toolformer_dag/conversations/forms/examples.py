"""Messages that the examples of several forms share: a user asks for the weather, and the assistant calls a tool."""

from typing import Any

QUESTION_TEXT = "How warm is it in Oslo?"
ANSWER_TEXT = "It is 7 degrees in Oslo."
QUESTION = {"role": "user", "content": QUESTION_TEXT}
ANSWER = {"role": "assistant", "content": ANSWER_TEXT}
OPENAI_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}
OPENAI_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}
ANTHROPIC_CALL = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}],
}
ANTHROPIC_RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7 degrees"}],
}


def build_text_message(role: str, text: str) -> dict[str, Any]:
    """Build a message whose content is a list with one part: this text."""
    return {"role": role, "content": [{"type": "text", "text": text}]}
