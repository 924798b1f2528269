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
    call_opening,
    in_markers,
    in_paper_form,
    marker_places,
)
from toolformer_dag.texts.input_ends import find_behind_input

ANCHOR = "a"
"""Any text that does not merge with the text after it."""
NAME_ANCHORS = ("a", ".", "0", "\n", "]")
"""The same before the name of a tool; several, because a letter may merge with the name."""
OUTPUT = "\nOutput: "


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
        """Return the index of the token that begins at character `offset` of the text.

        Raises OffsetError where none begins there; it names the nearest character at which a token begins. Tokens that
        are the later bytes of a character do not count.
        """
        begins_here = (self.offsets == offset) & ~self.inside  # [n]
        matches = np.flatnonzero(begins_here)
        if not len(matches):
            raise OffsetError(offset, self.nearest_boundary(offset))
        return int(matches[0])

    def place_at(self, text: str, offset: int) -> CallPlace | None:
        """Return where among these tokens a call stands that somebody puts before character `offset` of their `text`.

        A call stands where a token begins. If none begins at that character, the call may move over the white space
        beside it. Return None if no token begins there either.

        The result names the character; `token`, before which the call is sampled; and `position`, the first token after
        it that its losses count. They differ where the first of them is white space.
        """
        whole_character_tokens = np.flatnonzero(~self.inside)  # indices of the tokens before which a call may stand
        place = place_at(text, self.offsets[whole_character_tokens], offset)
        if place is None:
            return None
        # `place` numbers only the tokens that were passed; the result numbers all tokens.
        return CallPlace(
            place.offset,
            token=int(whole_character_tokens[place.token]),
            position=int(whole_character_tokens[place.position]),
        )

    def nearest_boundary(self, offset: int) -> int:
        """Return the character nearest to `offset` at which a token begins; 0 in a text without tokens."""
        boundary_offsets = self.offsets[~self.inside]
        if not len(boundary_offsets):
            return 0
        nearest = np.argmin(np.abs(boundary_offsets - offset))
        return int(boundary_offsets[nearest])


class Mark(NamedTuple):
    """A marker of a call in a text, such as ` [`, and the character at which it begins."""

    marker: str
    start: int


class Encoding:
    """A fast tokenizer that encodes the parts of the method's sequences: prompts, texts and calls.

    Calls have the paper's form, ` [Name(input) -> result]`, wherever they are passed in or returned. Only here are they
    rewritten with the model's `markers`. Texts of C* (the augmented texts for training) have these markers already. A
    text that holds the string of a special token, such as "<s>", gets the tokens of its characters.

    - `tokenizer`: a fast one of transformers.
    - `markers`: what opens, divides and closes a call, such as ` [`, ` ->` and `]`.
    - `added`: by marker, its tokens, for the markers that are added tokens of the tokenizer. Only calls have them.
    - `bos`, `eos`: the tokens before and after a sequence, as lists, which are empty where the tokenizer adds none.
    - `start`: the tokens of ` [`, or of another marker that opens a call. Every call begins with them, in prompts and
      C* as in sampling and decoding. Where the tokenizer merges ` [` with a name, the two are tokenized apart.
    - `output`: the tokens of "Output: ", which stand between a text and its copy with calls.
    - `anchor`: "a" for tokenizers that add a space before the first word (Llama 2), else "". `start`, `output` and
      calls stand inside a sequence, so they are tokenized after this text, whose tokens are then cut off.
    """

    def __init__(self, tokenizer: Any, markers: CallMarkers | None = None) -> None:
        """Tokenize the markers of calls, such as ` [`, as they stand inside a sequence.

        tokenizer: a fast one of transformers. markers: by default those in its files, else the paper's.
        """
        self.tokenizer = tokenizer
        self.markers = markers or CallMarkers(**tokenizer.init_kwargs.get(MARKERS, {}))
        self.added = _added_markers(tokenizer, self.markers)
        self.bos = _leading_special_tokens(tokenizer)
        self.eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

        # Most tokenizers write ` [` after a text as they write it alone. Llama 2's adds a space to what is alone.
        writes_pieces_alike = self._appends_start(self._ids(ANCHOR), self._ids(API_START))
        self.anchor = "" if writes_pieces_alike else ANCHOR
        self._anchor_ids: list[int] = [] if writes_pieces_alike else self._ids(ANCHOR)
        begin_ids, self.output = self._ids_inside([self.markers.begin, OUTPUT])
        self.start = self.added.get(self.markers.begin, begin_ids)

        self._call_opening = call_opening(None, self.markers.begin)  # the pattern of ` [` where it opens a call
        self._marker_ids = {self.markers.begin: self.start, **self.added}  # markers that are never merged with text
        self._end_markers: tuple[str, ...] = (self.markers.end,)  # what ends a sampled call

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt` and "Input: " after it; BOS comes first where the tokenizer adds it."""
        written = in_markers(f"{prompt}Input: ", self.markers)
        return self.bos + self.with_calls([written])[0].ids

    def texts(self, texts: Sequence[str]) -> list[TextTokens]:
        """Return the tokens of each text, without special tokens, with the character at which each token begins.

        Characters that the tokenizer drops belong to the next token. Accents that it merges into a letter belong to the
        letter's token.
        """
        if not texts:
            return []
        encoded = self._encoded(texts, return_offsets_mapping=True)
        rows = zip(texts, encoded.input_ids, encoded.offset_mapping, strict=True)
        return [_text_tokens(text, ids, spans) for text, ids, spans in rows]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens that `texts` gives each text; half as slow, because offsets are left out."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        return [len(text.ids) for text in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def calls(self, calls: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each call, written with the model's markers; the first are `start`, the tokens of ` [`.

        calls: with or without a result, in the paper's form, such as " [Calculator(2+3) -> 5]" with its leading space.

        A call that the tokenizer would begin otherwise is tokenized in pieces. It stays in one piece where the pieces
        would decode to another text.
        """
        if not calls:
            return []
        written_calls = [in_markers(call, self.markers) for call in calls]
        tokens_of_calls = []
        for written_call, ids in zip(written_calls, self._ids_inside(written_calls), strict=True):
            if self._needs_split(written_call, ids):
                split = self._split(written_call, ids)
                if split is not None:
                    ids = split.ids
            tokens_of_calls.append(ids)
        return tokens_of_calls

    def with_calls(self, texts: Sequence[str]) -> list[TextTokens]:
        """Return the tokens of texts that may hold calls, written with the model's markers, as training texts do.

        A call gets the tokens that it has in sampling and decoding: no token spans a marker such as ` [` and the text
        beside it. A text without a call is tokenized as usual. So is a text that decodes to another one where its
        markers are tokenized apart.
        """
        tokens_of_texts = []
        for text, tokens in zip(texts, self.texts(texts), strict=True):
            if not self._markers_are_apart(text, tokens):
                split = self._split(text, tokens.ids)
                if split is not None:
                    tokens = split
            tokens_of_texts.append(tokens)
        return tokens_of_texts

    def keeps_text_tokens(self) -> bool:
        """Return whether a text keeps its tokens where ` [` or "Output: " is appended to it."""
        if not self.anchor:
            return True
        [start] = self._ids_inside([API_START])
        for piece, ids in ((API_START, start), (OUTPUT, self.output)):
            if self._ids(self.anchor + piece) != self._anchor_ids + ids:
                return False
        return self._appends_start(self._anchor_ids, start)

    def body(self, sampled: Sequence[int]) -> str | None:
        """Return the call in a sample, without its brackets and in the paper's form. Return None if it has no end.

        sampled: the tokens that the model wrote after " [". "Calculator(2+3)] and" gives "Calculator(2+3)". A "]"
        inside the call's input is no end. In the encoding `before_results`, "->" ends a call too.
        """
        text = self._text([*self.start, *sampled])
        begin = self.markers.begin.strip()
        after_begin = text[text.index(begin) + len(begin) :]
        ends = []  # the characters at which an end marker stands after the input
        for marker in self._end_markers:
            end = find_behind_input(marker.strip(), after_begin)
            if end >= 0:
                ends.append(end)
        if not ends:
            return None
        return in_paper_form(after_begin[: min(ends)], self.markers)

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
        """Return whether a sample is complete: it holds a whole call, or its last token is EOS.

        A "]" does not end a call where it closes a list or stands in a string of the input.
        """
        return sampled[-1] in self.eos or self.body(sampled) is not None

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each token whether it may end a sample, [tokens]; ids beyond the vocabulary do not."""
        return np.isin(tokens, self._ending_tokens)

    @cached_property
    def _ending_tokens(self) -> list[int]:
        """The tokens with which a sample may end: EOS, and those that may complete a marker such as "]".

        A marker that is an added token of the tokenizer (`added`) is completed by this token alone.
        """
        token_texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        ending_tokens = list(self.eos)
        for end_marker in self._end_markers:
            if self.added.get(end_marker):
                ending_tokens += self.added[end_marker]
                continue
            marker = end_marker.strip()
            ending_tokens += _completing_tokens(marker, token_texts)
        return ending_tokens

    def _ids_inside(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece as it stands inside a sequence, not at its beginning."""
        encoded = self._encoded([self.anchor + piece for piece in pieces])
        return [list(ids[len(self._anchor_ids) :]) for ids in encoded.input_ids]

    def _needs_split(self, call: str, ids: list[int]) -> bool:
        """Return whether a call has to be tokenized in pieces: its tokens `ids` do not begin with `start`.

        True for every call where markers are added tokens, because only `_split` writes these.
        """
        if self._call_opening.match(call) is None:
            return False
        return bool(self.added) or ids[: len(self.start)] != self.start

    def _markers_are_apart(self, text: str, tokens: TextTokens) -> bool:
        """Return whether no token of a text spans a ` [` that opens a call and the text beside it.

        True for a text without calls. False for one with calls where markers are added tokens, because only `_split`
        writes these.
        """
        opening_bounds: set[int] = set()  # the characters at which each ` [` begins and ends
        for match in self._call_opening.finditer(text):
            opening_bounds.update(match.span())
        if not opening_bounds:
            return True
        if self.added:
            return False
        token_starts = set(tokens.offsets[~tokens.inside].tolist())  # `inside`: tokens that begin within a character
        return opening_bounds <= token_starts

    def _split(self, text: str, whole: list[int]) -> TextTokens | None:
        """Tokenize a text with calls in pieces: each marker, such as ` [`, and each text between two markers.

        So no token spans a marker and the text beside it. "is [A(1)] so" has the pieces "is", " [" and "A(1)] so"; if
        all markers are added tokens of the tokenizer (`added`), also "]".

        whole: the tokens of the text in one piece. Return None if the tokens of the pieces decode to another text than
        these do, and markers are no added tokens.
        """
        tokens = _joined(self._parts(text))
        if not self.added:
            is_other_text = self._text(tokens.ids) != self._text(whole)
            if is_other_text:
                return None
        return tokens

    def _parts(self, text: str) -> list[TextTokens]:
        """Return the tokens of each text between two markers, and of each marker, in order."""
        parts = []
        piece_start = 0
        for mark in self._marks(text):  # the last one is empty, at the end of the text
            piece_text = text[piece_start : mark.start]
            piece = self._after_marker(piece_text) if piece_start else self.texts([piece_text])[0]
            parts.append(TextTokens(piece.ids, piece.offsets + piece_start, piece.inside))
            parts.append(self._marker_tokens(mark))
            piece_start = mark.start + len(mark.marker)
        return parts

    def _marker_tokens(self, mark: Mark) -> TextTokens:
        """Return the tokens of a marker; each gets the marker's first character. An empty marker has none."""
        ids = self._marker_ids.get(mark.marker, [])
        return TextTokens(ids, offsets=np.full(len(ids), mark.start, np.int32), inside=np.zeros(len(ids), np.bool_))

    def _marks(self, text: str) -> Iterator[Mark]:
        """Yield the markers of calls in a text that are tokenized apart from it, with their first characters, in order.

        These are ` [` at each call or, where the tokenizer has markers as added tokens, all of them. Last comes an
        empty marker at the end of the text.
        """
        if self.added:
            for marker, start in marker_places(text, self.markers):
                if marker in self._marker_ids:
                    yield Mark(marker, start)
        else:
            for match in self._call_opening.finditer(text):
                yield Mark(match[0], match.start())
        yield Mark("", len(text))

    def _after_marker(self, text: str) -> TextTokens:
        """Tokenize a text that follows a marker such as ` [`, so that its first token is not one of a text's beginning.

        Some tokenizers (Llama 2) add a space before the first word. For these the text is tokenized after an anchor,
        another short text whose tokens are cut off again: the first anchor that does not merge with the text.
        """
        if self.anchor:
            for anchor in NAME_ANCHORS:
                anchor_ids = self._ids(anchor)
                [anchored] = self.texts([anchor + text])
                text_start = len(anchor_ids)
                if anchored.ids[:text_start] == anchor_ids:
                    return TextTokens(
                        anchored.ids[text_start:],
                        offsets=anchored.offsets[text_start:] - len(anchor),
                        inside=anchored.inside[text_start:],
                    )
        return self.texts([text])[0]

    def _appends_start(self, before: list[int], start: list[int]) -> bool:
        """Return whether the tokens `before` and `start` decode to the text of `before` and then ` [`."""
        return self._text(before + start) == self._text(before) + API_START

    def _ids(self, piece: str) -> list[int]:
        return list(self._encoded([piece]).input_ids[0])

    def _encoded(self, texts: Sequence[str], **options: Any) -> Any:
        return self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False, **options
        )

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _completing_tokens(marker: str, token_texts: Sequence[str]) -> list[int]:
    """Return the tokens that may complete a marker: their text holds it, as ")]" does, or begins with its last part.

    "->" may be written as two tokens, "-" and ">". token_texts: the text of each token of the vocabulary.
    """
    tails = tuple(marker[cut:] for cut in range(1, len(marker)))  # (">",) for "->"
    return [token for token, text in enumerate(token_texts) if marker in text or text.startswith(tails)]


def _added_markers(tokenizer: Any, markers: CallMarkers) -> dict[str, list[int]]:
    """Return the tokens of each marker of calls that the tokenizer has as an added token, by marker."""
    vocabulary_of_added = tokenizer.get_added_vocab()
    tokens_of_markers = {}
    for _, marker in markers:
        if marker.strip() in vocabulary_of_added:
            encoded = tokenizer(marker, add_special_tokens=False, split_special_tokens=False)
            tokens_of_markers[marker] = encoded.input_ids
    return tokens_of_markers


def _leading_special_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer adds before a text, such as BOS; found by encoding "a"."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full)):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _joined(parts: Sequence[TextTokens]) -> TextTokens:
    """Return the tokens of all parts of a text in one."""
    ids = [token for part in parts for token in part.ids]
    offsets = np.concatenate([part.offsets for part in parts])
    inside = np.concatenate([part.inside for part in parts])
    return TextTokens(ids, offsets, inside)


def _text_tokens(text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> TextTokens:
    """Return the tokens of a text with the character at which each begins, so that each character has a token.

    spans: the first character of each token and the one after its last, by the tokenizer.

    Spans overlap where a character is several tokens: the later ones begin `inside` it. They leave gaps where the
    tokenizer drops characters, which then belong to the token after the gap. With spans (0, 1), (3, 4), (3, 4), tokens
    before each token reach to the characters [0, 1, 4]. So tokens begin at [0, 1, 3], and the last one inside a
    character.
    """
    starts, ends = np.array(spans, np.int32).reshape(-1, 2).T  # [n] each
    # The character up to which the tokens before each token reach, [n].
    ends_before = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1].astype(np.int32)
    if not text.isascii():
        for token in np.flatnonzero(ends_before < starts):
            ends_before[token] = _end_of_accents(text, int(ends_before[token]), int(starts[token]))
    return TextTokens(list(ids), offsets=np.minimum(starts, ends_before), inside=starts < ends_before)


def _end_of_accents(text: str, start: int, end: int) -> int:
    """Return the first character from `start` on that is no accent; `end` where all up to there are.

    The characters from `start` to `end` have no token of their own. A tokenizer that merges accents into letters (NFC)
    drops accents after a letter, which so belong to the letter's token.
    """
    while start < end and _combines(text[start]):
        start += 1
    return start


def _combines(character: str) -> bool:
    """Return whether a character is a part of the one before it: a combining mark, or a Hangul vowel or final."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"
