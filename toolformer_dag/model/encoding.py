"""Encode texts and calls as the method's token sequences; decode sampled tokens to the text of a call."""

import unicodedata
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.weights import MARKERS, OffsetError
from toolformer_dag.settings.call_markers import CallMarkers
from toolformer_dag.texts.call_places import CallPlace, place_at
from toolformer_dag.texts.calls import (
    API_START,
    build_opening_pattern,
    iter_marker_places,
    rewrite_markers,
    to_paper_form,
)
from toolformer_dag.texts.input_ends import find_behind_input

ANCHOR = "a"
"""A short text before which others are tokenized as inside a sequence; its tokens are then cut off."""
NAME_ANCHORS = ("a", ".", "0", "\n", "]")
"""Anchors before the name of a tool, in order of preference: a letter may merge with the name."""
OUTPUT = "\nOutput: "
"""What stands between a text and its copy with calls."""


@dataclass(frozen=True, slots=True, eq=False)
class TextTokens:
    """The tokens x_0..x_(n-1) of a text.

    - `ids`: their numbers in the vocabulary.
    - `offsets` [n]: the character of the text at which each token begins.
    - `inside` [n]: whether it begins inside a character, as the later bytes of an emoji do. No call can stand there.

    The text "a 😀" may have ids [64, 30, 31], offsets [0, 1, 2] and inside [False, False, True].
    """

    ids: list[int]
    offsets: NDArray[np.int32]
    inside: NDArray[np.bool_]

    def position_at(self, offset: int) -> int:
        """Find the token that begins at a character of the text.

        Returns:
            The index of the token.

        Raises:
            OffsetError: No token begins there. The error names the nearest character at which one does.
        """
        begins_here = (self.offsets == offset) & ~self.inside  # [n]
        matches = np.flatnonzero(begins_here)
        if not len(matches):
            raise OffsetError(offset, self.nearest_boundary(offset))
        return int(matches[0])

    def place_at(self, text: str, offset: int) -> CallPlace | None:
        """Find the place among the tokens at which a call stands if it is put before a character of the text.

        White space around the character makes no difference.

        Args:
            text: The text of these tokens.
            offset: The index of the character.

        Returns:
            The place, or None if no token begins there, for example inside a word.
        """
        possible_tokens = np.flatnonzero(~self.inside)  # indices of the tokens before which a call may stand
        place = place_at(text, self.offsets[possible_tokens], offset)
        if place is None:
            return None

        # `place` counts only the possible tokens, the result counts all tokens. The call is sampled before `token`,
        # which may be white space, and judged from `position` on, the first token that is more than white space.
        return CallPlace(
            place.offset,
            token=int(possible_tokens[place.token]),
            position=int(possible_tokens[place.position]),
        )

    def nearest_boundary(self, offset: int) -> int:
        """Find the character nearest to `offset` at which a token begins; it is 0 in a text without tokens."""
        boundary_offsets = self.offsets[~self.inside]
        if not len(boundary_offsets):
            return 0
        nearest = np.argmin(np.abs(boundary_offsets - offset))
        return int(boundary_offsets[nearest])

    def part(self, first: int, end: int | None = None) -> "TextTokens":
        """Return the tokens from index `first` up to the index `end`, by default to the last one."""
        return TextTokens(self.ids[first:end], self.offsets[first:end], self.inside[first:end])

    def shifted(self, characters: int) -> "TextTokens":
        """Return the tokens with `characters` added to each offset."""
        return TextTokens(self.ids, self.offsets + characters, self.inside)


class Mark(NamedTuple):
    """A marker of a call in a text.

    - `marker`: such as ` [`; empty at the end of the text.
    - `start`: the character at which it begins.
    """

    marker: str
    start: int

    @property
    def end(self) -> int:
        """The character after the marker."""
        return self.start + len(self.marker)


class Encoding:
    """A fast tokenizer that encodes the parts of the method's sequences: prompts, texts and calls.

    Calls are passed in and returned in the paper's form, ` [Name(input) -> result]`, and tokenized with the model's
    `markers`. Texts of C* (the augmented texts for training) have these markers already. A text that holds the string
    of a special token, such as "<s>", gets the tokens of its characters.

    - `tokenizer`: a fast one of transformers.
    - `markers`: what opens, divides and closes a call, such as ` [`, ` ->` and `]`.
    - `added`: the tokens of each marker that is an added token of the tokenizer, by marker.
    - `bos`: the tokens before a sequence; none where the tokenizer adds none.
    - `eos`: the token after a sequence, in a list; empty where the tokenizer has none.
    - `anchor`: "a" for tokenizers that add a space before the first word (Llama 2), else "". What stands inside a
      sequence is tokenized after this text, whose tokens are then cut off.
    - `start`: the tokens of ` [`, or of another marker that opens a call. Every call begins with them, in prompts and
      C* as in sampling and decoding.
    - `output`: the tokens of a line break and "Output: ", which stand between a text and its copy with calls.
    """

    def __init__(self, tokenizer: Any, markers: CallMarkers | None = None) -> None:
        """Prepare a tokenizer, and tokenize the markers of calls, such as ` [`, as they stand inside a sequence.

        Args:
            tokenizer: A fast tokenizer of transformers.
            markers: The markers of calls. By default they come from the tokenizer's files, or else from the paper.
        """
        self.tokenizer = tokenizer
        self.markers = markers or CallMarkers(**tokenizer.init_kwargs.get(MARKERS, {}))
        self.added = _encode_added_markers(tokenizer, self.markers)  # marker -> ids, for markers in the vocabulary
        self.bos = _list_leading_special_tokens(tokenizer)
        self.eos = _list_eos(tokenizer)

        # Llama 2's tokenizer adds a space before the first word. What stands inside a sequence is tokenized after the
        # anchor "a", whose ids are cut off again. Other tokenizers need no anchor: it is "".
        self.anchor = self._choose_anchor()
        self._anchor_ids: list[int] = self._encode_piece(self.anchor) if self.anchor else []
        begin_ids, self.output = self._encode_inside(
            [self.markers.begin, OUTPUT]
        )  # the ids of ` [` and of "\nOutput: "
        self.start = self.added.get(self.markers.begin, begin_ids)  # the ids with which every call begins

        self._call_opening = build_opening_pattern(
            None, self.markers.begin
        )  # the pattern of ` [` where it opens a call
        self._marker_ids = {self.markers.begin: self.start, **self.added}  # markers that are never merged with text
        self._end_markers: tuple[str, ...] = (self.markers.end,)  # what ends a sampled call

    def _choose_anchor(self) -> str:
        """Return "a" where the tokenizer adds a space to a ` [` that stands alone, as Llama 2's does, else ""."""
        writes_pieces_alike = self._appends_start(self._encode_piece(ANCHOR), self._encode_piece(API_START))
        return "" if writes_pieces_alike else ANCHOR

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt` and "Input: " after it; BOS comes first where the tokenizer adds it."""
        written = rewrite_markers(f"{prompt}Input: ", self.markers)
        return self.bos + self.with_calls([written])[0].ids

    def texts(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts without special tokens, and note the character at which each token begins.

        If the tokenizer drops a character, it counts as part of the next token. If it merges an accent into a letter,
        the accent counts as part of the letter's token.
        """
        if not texts:
            return []

        encoded = self._tokenize(texts, return_offsets_mapping=True)
        spans_of_texts = encoded.offset_mapping  # for each text, the start and the end character of each token
        encodings = zip(texts, encoded.input_ids, spans_of_texts, strict=True)
        return [_build_text_tokens(text, ids, spans) for text, ids, spans in encodings]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text. This is twice as fast as `texts`, because it skips the offsets."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding.ids) for encoding in encodings]

    def calls(self, calls: Sequence[str]) -> list[list[int]]:
        """Tokenize calls with the model's markers.

        Args:
            calls: Calls in the paper's form, with or without a result, such as " [Calculator(2+3) -> 5]".

        Returns:
            The tokens of each call. They begin with `start`, the tokens of ` [`, if that is possible.
        """
        if not calls:
            return []
        written_calls = [rewrite_markers(call, self.markers) for call in calls]

        # A call tokenized in one piece may begin with another token, such as " [C". It is then tokenized in pieces.
        ids_in_one_piece = self._encode_inside(written_calls)
        return [
            self._split_call_if_needed(call, ids) for call, ids in zip(written_calls, ids_in_one_piece, strict=True)
        ]

    def _split_call_if_needed(self, call: str, ids_in_one_piece: list[int]) -> list[int]:
        """Return the tokens of a call that begin with `start`, where possible."""
        if not self._needs_split(call, ids_in_one_piece):
            return ids_in_one_piece
        pieces = self._split(call, ids_in_one_piece)
        return ids_in_one_piece if pieces is None else pieces.ids

    def with_calls(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts that may contain calls, written with the model's markers as in the training texts.

        A call gets the same tokens as in sampling and decoding: no token spans a marker such as ` [` and the text
        beside it. The exception is a text that would decode to another one if it were cut there.
        """
        return [self._split_if_needed(text, tokens) for text, tokens in zip(texts, self.texts(texts), strict=True)]

    def _split_if_needed(self, text: str, in_one_piece: TextTokens) -> TextTokens:
        """Return the tokens of a text with its markers apart, where possible. in_one_piece: its tokens without cuts."""
        if self._markers_are_apart(text, in_one_piece):
            return in_one_piece
        return self._split(text, in_one_piece.ids) or in_one_piece

    def keeps_text_tokens(self) -> bool:
        """Return whether the tokens of a text stay the same when ` [` or "Output: " is appended to it."""
        if not self.anchor:
            return True
        [start] = self._encode_inside([API_START])
        for piece, ids in ((API_START, start), (OUTPUT, self.output)):
            if self._encode_piece(self.anchor + piece) != self._anchor_ids + ids:
                return False
        return self._appends_start(self._anchor_ids, start)

    def body(self, sampled: Sequence[int]) -> str | None:
        """Decode a sample to the text of its call, without the brackets.

        A "]" inside the call's input does not end the call. In the encoding `before_results`, "->" ends it too. The
        model's own markers are replaced by the paper's.

        Args:
            sampled: The tokens after " [".

        Returns:
            The text of the call, such as "Calculator(2+3)" for "Calculator(2+3)] and", or None if the call has no end.
        """
        text = self._decode([*self.start, *sampled])  # with the tokens of " [", as the model read the sample
        begin = self.markers.begin.strip()
        after_begin = text[text.index(begin) + len(begin) :]

        end = self._find_call_end(after_begin)
        return None if end is None else to_paper_form(after_begin[:end], self.markers)

    def _find_call_end(self, text: str) -> int | None:
        """Find the character at which the first marker after a call's input begins.

        Args:
            text: The text after the marker that opens the call, such as "Calculator(2+3)] and".

        Returns:
            The index of the character (15 in this example), or None if there is no such marker.
        """
        ends = [find_behind_input(marker.strip(), text) for marker in self._end_markers]  # -1 where there is none
        return min((end for end in ends if end >= 0), default=None)

    @cached_property
    def before_results(self) -> "Encoding":
        """A copy of this encoding whose samples also end at "->", for models that were finetuned on calls with results.

        After "->" these models would write a result that no tool returned.
        """
        encoding = copy(self)
        encoding.__dict__.pop("_ending_tokens", None)  # cached for the original's markers
        encoding._end_markers = (*self._end_markers, self.markers.arrow)
        return encoding

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Return whether a sample is complete: it holds a whole call, or its last token is EOS."""
        return sampled[-1] in self.eos or self.body(sampled) is not None

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Check for each token whether it may end a sample; ids beyond the vocabulary may not.

        Returns:
            Booleans in the shape of `tokens`.
        """
        return np.isin(tokens, self._ending_tokens)

    @cached_property
    def _ending_tokens(self) -> list[int]:
        """Collect the tokens with which a sample may end: EOS, and all that may complete a marker such as "]"."""
        vocabulary = [[token] for token in range(len(self.tokenizer))]
        token_texts = self.tokenizer.batch_decode(vocabulary)
        ending_tokens = list(self.eos)
        for marker in self._end_markers:
            # If the marker is an added token of the tokenizer, only this token completes it.
            ending_tokens += self.added.get(marker) or _list_completing_tokens(marker.strip(), token_texts)
        return ending_tokens

    def _encode_inside(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece as it stands inside a sequence, not at its beginning."""
        encoded = self._tokenize([self.anchor + piece for piece in pieces])
        return [list(ids[len(self._anchor_ids) :]) for ids in encoded.input_ids]

    def _needs_split(self, call: str, ids: list[int]) -> bool:
        """Return whether a call has to be tokenized in pieces, because its tokens `ids` do not begin with `start`.

        If some markers are added tokens of the tokenizer, this is true for every call: only `_split` writes them.
        """
        if self._call_opening.match(call) is None:
            return False
        return bool(self.added) or ids[: len(self.start)] != self.start

    def _markers_are_apart(self, text: str, tokens: TextTokens) -> bool:
        """Return whether a text's tokens keep each ` [` that opens a call apart from the text beside it.

        A token such as " [A" would not. If some markers are added tokens of the tokenizer, the answer is False for
        every text with calls: only `_split` writes these tokens.
        """
        opening_bounds: set[int] = set()  # the characters at which a ` [` begins or ends
        for match in self._call_opening.finditer(text):
            opening_bounds.update(match.span())
        if not opening_bounds:
            return True

        if self.added:
            return False
        token_starts = set(tokens.offsets[~tokens.inside].tolist())  # `inside`: tokens that begin within a character
        return opening_bounds <= token_starts

    def _split(self, text: str, ids_in_one_piece: list[int]) -> TextTokens | None:
        """Tokenize a text with calls piece by piece, such as "is", " [" and "A(1)] so", and join the tokens.

        Args:
            text: The text.
            ids_in_one_piece: The tokens of the same text without cuts.

        Returns:
            The tokens, or None if they decode to another text than `ids_in_one_piece`. This is not checked if some
            markers are added tokens of the tokenizer, because only the pieces contain these tokens.
        """
        tokens = _join_parts(self._encode_parts(text))
        if self.added:  # the tokens without cuts lack the markers' own tokens
            return tokens

        is_same_text = self._decode(tokens.ids) == self._decode(ids_in_one_piece)
        return tokens if is_same_text else None

    def _encode_parts(self, text: str) -> list[TextTokens]:
        """Cut a text at its markers, and tokenize each marker and each text between two markers, in order."""
        parts = []
        start = 0
        for mark in self._iter_marks(text):  # the last mark is empty, at the end of the text
            between = self._encode_text_between(text[start : mark.start], is_first=start == 0)
            parts.append(between.shifted(start))  # offsets count from the beginning of the whole text
            parts.append(self._encode_marker(mark))
            start = mark.end
        return parts

    def _encode_text_between(self, text: str, is_first: bool) -> TextTokens:
        """Return the tokens of a text between two markers, or before the first marker."""
        return self.texts([text])[0] if is_first else self._encode_after_marker(text)

    def _encode_marker(self, mark: Mark) -> TextTokens:
        """Return the tokens of a marker, all with the marker's first character as offset; none for an empty marker."""
        ids = self._marker_ids.get(mark.marker, [])
        return TextTokens(ids, offsets=np.full(len(ids), mark.start, np.int32), inside=np.zeros(len(ids), np.bool_))

    def _iter_marks(self, text: str) -> Iterator[Mark]:
        """Find the markers of calls that are tokenized apart from the text around them.

        Yields:
            The markers in order, and last an empty one at the end of the text.
        """
        if self.added:  # ` [`, and all markers that are added tokens of the tokenizer
            for marker, start in iter_marker_places(text, self.markers):
                if marker in self._marker_ids:
                    yield Mark(marker, start)
        else:  # only the ` [` of each call
            for match in self._call_opening.finditer(text):
                yield Mark(match[0], match.start())

        yield Mark("", len(text))

    def _encode_after_marker(self, text: str) -> TextTokens:
        """Return the tokens of a text that follows a marker such as ` [`, without the space of a first word."""
        if self.anchor:
            for anchor in NAME_ANCHORS:
                tokens = self._encode_after_anchor(text, anchor=anchor)
                if tokens is not None:
                    return tokens
        return self.texts([text])[0]

    def _encode_after_anchor(self, text: str, *, anchor: str) -> TextTokens | None:
        """Return the tokens of a text that follows the text `anchor`; None where a token spans both."""
        anchor_ids = self._encode_piece(anchor)
        [anchored] = self.texts([anchor + text])
        if anchored.ids[: len(anchor_ids)] != anchor_ids:
            return None
        return anchored.part(len(anchor_ids)).shifted(-len(anchor))

    def _appends_start(self, before: list[int], start: list[int]) -> bool:
        """Return whether the tokens `before` and `start` decode to the text of `before` and then ` [`."""
        return self._decode(before + start) == self._decode(before) + API_START

    def _encode_piece(self, piece: str) -> list[int]:
        """Return the tokens of a piece of text that stands alone."""
        return list(self._tokenize([piece]).input_ids[0])

    def _tokenize(self, texts: Sequence[str], **options: Any) -> Any:
        """Return what the tokenizer makes of texts, without special tokens. options: further arguments for it."""
        return self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False, **options
        )

    def _decode(self, ids: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _list_eos(tokenizer: Any) -> list[int]:
    """Return the token that ends a sequence, in a list; empty where the tokenizer has none."""
    token = tokenizer.eos_token_id
    return [] if token is None else [int(token)]


def _list_completing_tokens(marker: str, token_texts: Sequence[str]) -> list[int]:
    """Return the tokens that may complete a marker: their text holds it, as ")]" does, or begins with its last part.

    token_texts: the text of each token of the vocabulary. "->" may be written as two of them, "-" and ">".
    """
    tails = tuple(marker[cut:] for cut in range(1, len(marker)))  # (">",) for "->"
    return [token for token, text in enumerate(token_texts) if marker in text or text.startswith(tails)]


def _encode_added_markers(tokenizer: Any, markers: CallMarkers) -> dict[str, list[int]]:
    """Find the markers of calls that are added tokens of the tokenizer, and return the tokens of each."""
    vocabulary_of_added = tokenizer.get_added_vocab()
    tokens_of_markers = {}
    for _, marker in markers:
        if marker.strip() in vocabulary_of_added:
            encoded = tokenizer(marker, add_special_tokens=False, split_special_tokens=False)
            tokens_of_markers[marker] = encoded.input_ids
    return tokens_of_markers


def _list_leading_special_tokens(tokenizer: Any) -> list[int]:
    """List the tokens that the tokenizer puts before a text, such as BOS."""
    text_tokens = tokenizer("a", add_special_tokens=False).input_ids
    all_tokens = tokenizer("a").input_ids

    for start in range(len(all_tokens)):  # look for the first place where the text's own tokens stand
        if all_tokens[start : start + len(text_tokens)] == text_tokens:
            return list(all_tokens[:start])
    return []


def _join_parts(parts: Sequence[TextTokens]) -> TextTokens:
    """Return the tokens of all parts of a text in one."""
    ids = [token for part in parts for token in part.ids]
    offsets = np.concatenate([part.offsets for part in parts])
    inside = np.concatenate([part.inside for part in parts])
    return TextTokens(ids, offsets, inside)


def _build_text_tokens(text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> TextTokens:
    """Note for each token of a text where it begins, in such a way that every character belongs to a token.

    Args:
        text: The text.
        ids: Its tokens.
        spans: The first character of each token and the character after its last one, from the tokenizer. They leave
            gaps where the tokenizer drops characters, and overlap where one character is several tokens.
    """
    # For example, the tokenizer drops characters 1 and 2, and writes character 3 in two tokens:
    #   spans        (0, 1)  (3, 4)  (3, 4)
    #   ends_before  0       1       4       where the tokens before it end
    #   offsets      0       1       3       the dropped characters belong to the second token
    #   inside       False   False   True    the third token begins inside a character

    starts, ends = np.array(spans, np.int32).reshape(-1, 2).T  # [n] each
    ends_before = _compute_ends_before(ends)  # [n]
    if not text.isascii():
        # A dropped accent belongs to the letter before it, not to the next token.
        ends_before = _move_ends_after_accents(text, starts, ends_before)

    return TextTokens(list(ids), offsets=np.minimum(starts, ends_before), inside=starts < ends_before)


def _compute_ends_before(ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Compute for each token the character after all earlier tokens; it is 0 for the first token.

    Args:
        ends: The character after each token, [n].
    """
    reached = np.concatenate([[0], np.maximum.accumulate(ends)])  # [n + 1]
    return reached[:-1].astype(np.int32)


def _move_ends_after_accents(text: str, starts: NDArray[np.int32], ends_before: NDArray[np.int32]) -> NDArray[np.int32]:
    """Move each of `ends_before` behind the accents that follow there without a token of their own.

    A tokenizer that merges accents into letters (NFC) drops them. They belong to the letter before them.

    Args:
        text: The text.
        starts: The first character of each token, [n].
        ends_before: The character after all earlier tokens, for each token, [n].

    Returns:
        A changed copy of `ends_before`.
    """
    moved = ends_before.copy()
    for token in np.flatnonzero(ends_before < starts):
        moved[token] = _find_end_of_accents(text, start=int(ends_before[token]), end=int(starts[token]))
    return moved


def _find_end_of_accents(text: str, *, start: int, end: int) -> int:
    """Return the first character from `start` on that is no accent, at most `end`."""
    while start < end and _is_combining(text[start]):
        start += 1
    return start


def _is_combining(character: str) -> bool:
    """Return whether a character belongs to the one before it: a combining mark, or a Hangul vowel or final."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"
