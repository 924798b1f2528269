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
    """

    ids: list[int]
    offsets: NDArray[np.int32]
    inside: NDArray[np.bool_]

    def position_at(self, offset: int) -> int:
        """Return the index of the token that begins at character `offset` of the text.

        Raises OffsetError, with the nearest character at which a token begins, where none begins there. Tokens that are
        the later bytes of a character do not count.
        """
        begins_here = (self.offsets == offset) & ~self.inside  # [n]
        matches = np.flatnonzero(begins_here)
        if not len(matches):
            raise OffsetError(offset, self.nearest_boundary(offset))
        return int(matches[0])

    def place_at(self, text: str, offset: int) -> CallPlace | None:
        """Return where among these tokens a call stands that is put before character `offset` of their `text`.

        The place may lie beside the white space around that character, where a token begins. None where none does.
        """
        boundaries = np.flatnonzero(~self.inside)  # indices of the tokens that begin with a character
        place = place_at(text, self.offsets[boundaries], offset)
        if place is None:
            return None
        # `place` counts these tokens alone; count all of them instead.
        return CallPlace(place.offset, int(boundaries[place.token]), int(boundaries[place.position]))

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
    """A fast tokenizer that encodes the method's pieces separately, without special tokens.

    - The string of a special token in a text is encoded as the tokens of its characters.
    - Calls have the paper's form, ` [Name(input) -> result]`, wherever they are passed in or returned. Only here are
      they rewritten with the model's `markers`, by default those in the tokenizer's files. Texts of C* have these
      markers already.
    - `start` are the tokens of ` [`, or of another marker that opens a call. A call always begins with them: in
      prompts, calls and C* as in sampling and decoding. A tokenizer that merges ` [` with a name, or with the word
      before it, is applied to the pieces apart.
    - `added`: marker -> its tokens, for the markers that the tokenizer has as added tokens. Texts hold these tokens
      only in calls.
    - `start`, `output` and calls stand inside a sequence. Some tokenizers (Llama-2) add a space before the first word.
      For these, the pieces are tokenized after the text `anchor`, whose tokens are then cut off. `anchor` is "" for all
      others.
    - `bos`, `eos`: the tokens before and after a sequence, as lists, which are empty where the tokenizer adds none.
    """

    def __init__(self, tokenizer: Any, markers: CallMarkers | None = None) -> None:
        """Find out how a tokenizer writes the markers of calls, such as ` [`, apart from the text around them.

        tokenizer: a fast one of transformers. markers: by default those in its files, else the paper's.
        """
        self.tokenizer = tokenizer
        self.markers = markers or CallMarkers(**tokenizer.init_kwargs.get(MARKERS, {}))
        self._call_opening = call_opening(None, self.markers.begin)
        vocabulary_of_added = tokenizer.get_added_vocab()
        self.added: dict[str, list[int]] = {}
        for _, marker in self.markers:
            if marker.strip() in vocabulary_of_added:
                self.added[marker] = tokenizer(marker, add_special_tokens=False, split_special_tokens=False).input_ids
        self.bos = _leading_special_tokens(tokenizer)
        self.eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

        # Where the tokens of ` [` alone do not write ` [` after others, the tokenizer changes the beginning of a text.
        needs_anchor = not self._appends_start(self._ids(ANCHOR), self._ids(API_START))
        self.anchor = ANCHOR if needs_anchor else ""
        self._anchor_ids = self._ids(ANCHOR) if needs_anchor else []
        begin_ids, self.output = self._ids_inside([self.markers.begin, OUTPUT])
        self.start = self.added.get(self.markers.begin, begin_ids)

        self._marker_ids = {self.markers.begin: self.start, **self.added}  # markers that are never merged with text
        self._end_markers: tuple[str, ...] = (self.markers.end,)  # what ends a sample

    def head(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt` and "Input: ", with BOS first where the tokenizer adds it."""
        written = in_markers(f"{prompt}Input: ", self.markers)
        return self.bos + self.with_calls([written])[0].ids

    def texts(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts as they are, without special tokens; return tokens with the character at which each begins.

        Text that the tokenizer drops belongs to the next token; accents that it merges into a letter belong to that.
        """
        if not texts:
            return []
        encoded = self._encoded(texts, return_offsets_mapping=True)
        rows = zip(texts, encoded.input_ids, encoded.offset_mapping, strict=True)
        return [_text_tokens(text, ids, spans) for text, ids, spans in rows]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, as `texts` gives them, at half the cost: without offsets."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        return [len(text.ids) for text in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def calls(self, calls: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each call, in the model's markers; they begin with those of ` [`.

        calls: with or without a result, in the paper's form, such as " [Calculator(2+3) -> 5]" with its leading space.
        """
        if not calls:
            return []
        written_calls = [in_markers(call, self.markers) for call in calls]
        tokens_of_calls = []
        for written, ids in zip(written_calls, self._ids_inside(written_calls), strict=True):
            split = self._split(written, ids) if self._needs_split(written, ids) else None
            tokens_of_calls.append(split.ids if split else ids)
        return tokens_of_calls

    def with_calls(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts that may hold calls in the model's markers, as training texts do.

        A call gets the tokens that it has in sampling and decoding: no token spans a marker such as ` [` and the text
        beside it. A text without a call is tokenized as usual.
        """
        tokens_of_texts = []
        for text, tokens in zip(texts, self.texts(texts), strict=True):
            if not self._calls_are_split(text, tokens):
                tokens = self._split(text, tokens.ids) or tokens
            tokens_of_texts.append(tokens)
        return tokens_of_texts

    def keeps_text_tokens(self) -> bool:
        """Return whether appending ` [` to a text leaves the text's own tokens unchanged."""
        if not self.anchor:
            return True
        [start] = self._ids_inside([API_START])
        for piece, ids in ((API_START, start), (OUTPUT, self.output)):
            if self._ids(self.anchor + piece) != self._anchor_ids + ids:
                return False
        return self._appends_start(self._anchor_ids, start)

    def body(self, sampled: Sequence[int]) -> str | None:
        """Return the call in a sample, without its brackets and in the paper's form; None where it does not end.

        sampled: the tokens that the model wrote after " [". "Calculator(2+3)] and" gives "Calculator(2+3)". A "]" in
        the call's input ends nothing. With `before_results`, "->" ends a call too.
        """
        text = self._text([*self.start, *sampled])
        begin = self.markers.begin.strip()
        after_begin = text[text.index(begin) + len(begin) :]
        ends = []  # where an end marker stands behind the input
        for marker in self._end_markers:
            end = find_behind_input(marker.strip(), after_begin)
            if end >= 0:
                ends.append(end)
        if not ends:
            return None
        return in_paper_form(after_begin[: min(ends)], self.markers)

    @cached_property
    def before_results(self) -> "Encoding":
        """The same for a model that was finetuned on calls with results: its samples end at "->" too.

        What it would write after that is a result that no tool returned.
        """
        encoding = copy(self)
        encoding.__dict__.pop("_ending_tokens", None)  # cached for the original's markers
        encoding._end_markers = (*self._end_markers, self.markers.arrow)
        return encoding

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Return whether a sample whose last token may end it is complete: a "]" in a string or a list ends none."""
        return sampled[-1] in self.eos or self.body(sampled) is not None

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each token may end a sample; ids beyond the tokenizer's vocabulary do not."""
        return np.isin(tokens, self._ending_tokens)

    @cached_property
    def _ending_tokens(self) -> list[int]:
        """The tokens that may complete a marker that ends a sample, such as "]", and EOS.

        These are the tokens whose text holds the marker, such as ")]", or begins with an end of it: "->" may be two
        tokens, of which the second is ">". A marker that is an added token has this token alone.
        """
        token_texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        ending_tokens = list(self.eos)
        for end_marker in self._end_markers:
            if self.added.get(end_marker):
                ending_tokens += self.added[end_marker]
                continue
            marker = end_marker.strip()
            tails = tuple(marker[cut:] for cut in range(1, len(marker)))
            for token, text in enumerate(token_texts):
                if marker in text or text.startswith(tails):
                    ending_tokens.append(token)
        return ending_tokens

    def _ids_inside(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece as it stands inside a sequence, not at its beginning."""
        encoded = self._encoded([self.anchor + piece for piece in pieces])
        return [list(ids[len(self._anchor_ids) :]) for ids in encoded.input_ids]

    def _needs_split(self, call: str, ids: list[int]) -> bool:
        """Return whether a call's tokens do not begin with `start`, or its markers have tokens of their own."""
        if self._call_opening.match(call) is None:
            return False
        return bool(self.added) or ids[: len(self.start)] != self.start

    def _calls_are_split(self, text: str, tokens: TextTokens) -> bool:
        """Return whether the tokens of a text keep its calls apart already, so that nothing has to be tokenized anew.

        That is so without calls; else where tokens begin before and after each ` [` that opens a call, and no marker
        is an added token.
        """
        ends_of_openings: set[int] = set()  # characters: where each ` [` begins, and where it ends
        for match in self._call_opening.finditer(text):
            ends_of_openings.update(match.span())
        if not ends_of_openings:
            return True
        token_starts = set(tokens.offsets[~tokens.inside].tolist())
        return not self.added and ends_of_openings <= token_starts

    def _split(self, text: str, whole: list[int]) -> TextTokens | None:
        """Tokenize a text with calls in pieces: each marker, such as ` [`, and each text between two markers.

        So no token spans a marker and the text beside it. All tokens of a marker get its first character as offset.

        whole: the tokens of the text in one piece. Returns None where the tokens of the pieces decode to another text
        than these do: then the tokenizer needs them together.
        """
        parts: list[TextTokens] = []
        piece_start = 0
        for mark in self._marks(text):
            piece_text = text[piece_start : mark.start]
            piece = self._after_marker(piece_text) if piece_start else self.texts([piece_text])[0]
            parts.append(TextTokens(piece.ids, piece.offsets + piece_start, piece.inside))
            marker_ids = self._marker_ids.get(mark.marker, [])
            parts.append(
                TextTokens(
                    marker_ids,
                    offsets=np.full(len(marker_ids), mark.start, np.int32),
                    inside=np.zeros(len(marker_ids), np.bool_),
                )
            )
            piece_start = mark.start + len(mark.marker)
        ids = [token for part in parts for token in part.ids]
        if not self.added and self._text(ids) != self._text(whole):
            return None
        offsets = np.concatenate([part.offsets for part in parts])
        inside = np.concatenate([part.inside for part in parts])
        return TextTokens(ids, offsets, inside)

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
        """Return whether the tokens `start` after other tokens decode to ` [` after these's text."""
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


def _leading_special_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer adds before a text: what stands before "a" where both are encoded."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full)):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _text_tokens(text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> TextTokens:
    """Return the tokens of a text with the character at which each begins, so that no character is left out.

    spans: the characters of each token as the tokenizer says: first, and last plus one. They may leave gaps. In a gap,
    accents at its beginning (merged by NFC) belong to the token before it, the rest (dropped) to the token after it.
    Spans overlap where a character is several tokens: the later ones begin `inside` it.
    """
    starts, ends = np.array(spans, np.int32).reshape(-1, 2).T  # [n] each
    # The character up to which the tokens before each token reach, [n]; beyond its own start inside a character.
    covered = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1].astype(np.int32)
    if not text.isascii():
        for token in np.flatnonzero(covered < starts):
            while covered[token] < starts[token] and _combines(text[covered[token]]):
                covered[token] += 1
    return TextTokens(list(ids), offsets=np.minimum(starts, covered), inside=starts < covered)


def _combines(character: str) -> bool:
    """Return whether it combines with the character before it: a combining mark, or a Hangul vowel or final."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"
