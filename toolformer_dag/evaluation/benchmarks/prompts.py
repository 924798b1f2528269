"""The zero-shot prompts of appendix C."""


def completion(statement: str) -> str:
    """C.1: LAMA and TempLAMA."""
    return f"Please complete the following text so that it is factually correct: {statement}"


def mathematics(context: str, question: str) -> str:
    """C.2: ASDiv, SVAMP and MAWPS; `context` is empty where a source has both in one."""
    return f"{context} {question} The answer is".lstrip()


def question_answering(question: str) -> str:
    """C.3: WebQuestions, Natural Questions, TriviaQA and Dateset."""
    return f"Answer the following question: {with_question_mark(question)}"


def multilingual(paragraph: str, question: str) -> str:
    """C.4: MLQA."""
    return (
        f"Your task is to answer a question based on the following paragraph: {paragraph} "
        f"Now answer the following question in English: {question}"
    )


def with_question_mark(question: str) -> str:
    """A question mark is added where there is none."""
    stripped = question.rstrip()
    return stripped if stripped.endswith("?") else f"{stripped}?"
