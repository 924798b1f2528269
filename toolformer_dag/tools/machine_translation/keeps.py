"""The rule for kept calls (appendix A): what a model could only know by looking ahead is not taught."""


def input_after_call_only(text: str, offset: int, input: str) -> bool:
    """Whether `input` stands in the text after the call's place and not before it; white space counts as one space.

    Such calls are removed: at inference the model cannot look ahead. `offset`: the character at which x_i begins.
    """
    wanted = " ".join(input.split())
    return wanted in " ".join(text[offset:].split()) and wanted not in " ".join(text[:offset].split())
