"""What of an unfinished text is shown while it is streamed: nothing that may become a stop word."""

from hypothesis import given
from hypothesis import strategies as st

from tests.steps import lines_run
from toolformer_dag.decoding.piece_feed import drop_uncertain_end

WORDS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=3)


@given(st.text("ab", max_size=12), WORDS)
def test_the_longest_beginning_of_a_stop_word_is_held_back(text: str, stop: list[str]) -> None:
    held_back = 0
    for word in stop:
        for length in range(1, len(word)):
            if text.endswith(word[:length]):
                held_back = max(held_back, length)
    assert drop_uncertain_end(text, stop) == text[: len(text) - held_back]


def test_a_long_stop_word_takes_no_more_steps_than_the_text_has_characters() -> None:
    assert lines_run(lambda: drop_uncertain_end("a text that goes on", ["z" * 900_000])) < 50
    assert lines_run(lambda: drop_uncertain_end("ab" * 100, ["ab" * 200 + "c"])) < 1000
