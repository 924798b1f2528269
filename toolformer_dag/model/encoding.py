"""Encode texts and calls as the method's token sequences; decode sampled tokens to the text of a call."""

import unicodedata
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.weights import MARKERS, OffsetError
from toolformer_dag.settings.call_markers import CallMarkers
from toolformer_dag.texts.call_places import CallPlace, place_at
from toolformer_dag.texts.calls import (
    API_START,
    call_opening,
    find_behind_input,
    in_markers,
    in_paper_form,
    marker_places,
)

ANCHOR = "a"  # any text that does not merge with the text after it
NAME_ANCHORS = ("a", ".", "0", "\n", "]")  # the same before the name of a tool, with which a letter may merge
OUTPUT = "\nOutput: "


@dataclass(frozen=True, slots=True, eq=False)
class TextTokens:
    """The tokens x_1..x_n of a text.

    `offsets` [n]: the character at which each token begins. `inside` [n]: whether it begins inside a character.
    """

    ids: list[int]
    offsets: NDArray[np.int32]
    inside: NDArray[np.bool_]

    def position_at(self, offset: int) -> int:
        """Return the index of the token that begins at character `offset`.

        Raises OffsetError with the nearest boundary where no token begins there.
        """
        starts = np.flatnonzero(~self.inside)
        matches = starts[self.offsets[starts] == offset]
        if not len(matches):
            raise OffsetError(offset, self.nearest_boundary(offset))
        return int(matches[0])

    def place_at(self, text: str, offset: int) -> CallPlace | None:
        """Return the place of a call that somebody puts before character `offset` of `text`, which has these tokens.

        None where no token begins there, nor in or after the white space around it.
        """
        starts = np.flatnonzero(~self.inside)  # tokens that begin inside a character have no place
        place = place_at(text, self.offsets[starts], offset)
        if place is None:
            return None
        return CallPlace(place.offset, int(starts[place.token]), int(starts[place.position]))

    def nearest_boundary(self, offset: int) -> int:
        """Return the character nearest to `offset` at which a token begins; 0 in a text without tokens."""
        begins = self.offsets[~self.inside]
        if not len(begins):
            return 0
        return int(begins[np.argmin(np.abs(begins - offset))])


class Encoding:
    """A fast tokenizer that encodes the method's pieces separately, without special tokens.

    - The string of a special token in a text is encoded as the tokens of its characters.
    - Calls that are given and read have the paper's form; here, and only here, they get the model's `markers`, by
      default those that the tokenizer tells. Texts of C* have them already.
    - The tokens of ` [`, or of another marker that opens a call, are always `start` before a name, in prompts, calls
      and C* as in sampling and decoding. A tokenizer that merges ` [` with a name, or with the word before it, is
      applied to the pieces apart. `added`: the tokens of markers that the tokenizer was given as tokens; only in calls
      do texts hold these.
    - `start`, `output` and calls stand inside a sequence. Some tokenizers (Llama-2) add a space before the first word.
      For these, the pieces are tokenized after `anchor`, and its tokens are cut off. `anchor` is "" for all others.
    """

    def __init__(self, tokenizer: Any, markers: CallMarkers | None = None) -> None:
        self.tokenizer = tokenizer
        self.markers = markers or CallMarkers(**tokenizer.init_kwargs.get(MARKERS, {}))
        self._begun = call_opening(None, self.markers.begin)
        tokens = tokenizer.get_added_vocab()
        self.added: dict[str, list[int]] = {
            marker: tokenizer(marker, add_special_tokens=False, split_special_tokens=False).input_ids
            for _, marker in self.markers
            if marker.strip() in tokens
        }
        self.bos = _leading_special_tokens(tokenizer)
        self.eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.anchor = "" if self._appends_start(self._ids(ANCHOR), self._ids(API_START)) else ANCHOR
        self._cut = self._ids(ANCHOR) if self.anchor else []
        self.start, self.output = self._inside([self.markers.begin, OUTPUT])
        self.start = self.added.get(self.markers.begin, self.start)
        self._apart_tokens = {self.markers.begin: self.start, **self.added}
        self._closing: tuple[str, ...] = (self.markers.end,)

    def head(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt` and "Input: ", with BOS first where the tokenizer adds it."""
        return self.bos + self.with_calls([in_markers(f"{prompt}Input: ", self.markers)])[0].ids

    def texts(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts unchanged and return their offsets.

        Text that the tokenizer drops belongs to the next token. Marks that it merged into a letter (NFC) belong to
        that letter.
        """
        if not texts:
            return []
        encoded = self._encoded(texts, return_offsets_mapping=True)
        parts = zip(texts, encoded.input_ids, encoded.offset_mapping, strict=True)
        return [_text_tokens(text, ids, spans) for text, ids, spans in parts]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, as `texts` gives them, at half the cost: without offsets."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        return [len(text.ids) for text in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def calls(self, calls: Sequence[str]) -> list[list[int]]:
        """Tokenize e(c) or e(c, r) with the leading space."""
        if not calls:
            return []
        written = [in_markers(call, self.markers) for call in calls]
        pairs = zip(written, self._inside(written), strict=True)
        return [
            apart.ids if self._is_merged(call, ids) and (apart := self._apart(call, ids)) else ids
            for call, ids in pairs
        ]

    def with_calls(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts that may hold calls, in the model's markers: texts of C*, held-out texts.

        Without a call the tokens are those of `texts`.
        """
        return [
            tokens if self._are_apart(text, tokens) else self._apart(text, tokens.ids) or tokens
            for text, tokens in zip(texts, self.texts(texts), strict=True)
        ]

    def keeps_text_tokens(self) -> bool:
        """Return whether appending ` [` to a text leaves the text's own tokens unchanged."""
        if not self.anchor:
            return True
        [start] = self._inside([API_START])
        pieces = (API_START, start), (OUTPUT, self.output)
        kept = all(self._ids(self.anchor + piece) == self._cut + ids for piece, ids in pieces)
        return kept and self._appends_start(self._cut, start)

    def body(self, sampled: Sequence[int]) -> str | None:
        """Return the text between " [" and the "]" that closes the call, of tokens sampled after " ["; else None."""
        text, begin = self._text([*self.start, *sampled]), self.markers.begin.strip()
        written = text[text.index(begin) + len(begin) :]
        ends = [end for sign in self._closing if (end := find_behind_input(sign.strip(), written)) >= 0]
        return in_paper_form(written[: min(ends)], self.markers) if ends else None

    @cached_property
    def before_results(self) -> "Encoding":
        """The same for a model that was finetuned on calls with results: its samples end at "->" too.

        What it would write after that is a result of its own.
        """
        encoding = copy(self)
        encoding.__dict__.pop("_ends", None)
        encoding._closing = (*self._closing, self.markers.arrow)
        return encoding

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Return whether a sample whose last token may end it is whole: a "]" in a string or a list ends none."""
        return sampled[-1] in self.eos or self.body(sampled) is not None

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each token may end a sample; ids beyond the tokenizer's vocabulary do not."""
        return np.isin(tokens, self._ends)

    @cached_property
    def _ends(self) -> list[int]:
        """The tokens whose text holds "]" (`)]` may be one token) or the end of a longer marker, and EOS."""
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        ends = list(self.eos)
        for marker in self._closing:
            sign = marker.strip()
            tails = tuple(sign[at:] for at in range(1, len(sign)))
            written = (token for token, text in enumerate(texts) if sign in text or text.startswith(tails))
            ends += self.added.get(marker) or written
        return ends

    def _inside(self, pieces: Sequence[str]) -> list[list[int]]:
        encoded = self._encoded([self.anchor + piece for piece in pieces])
        return [list(ids[len(self._cut) :]) for ids in encoded.input_ids]

    def _is_merged(self, call: str, ids: list[int]) -> bool:
        return self._begun.match(call) is not None and (bool(self.added) or ids[: len(self.start)] != self.start)

    def _are_apart(self, text: str, tokens: TextTokens) -> bool:
        """Return whether tokens begin at both ends of ` [` in each beginning of a call, and texts can write them."""
        if not (ends := {end for match in self._begun.finditer(text) for end in match.span()}):
            return True
        return not self.added and ends <= set(tokens.offsets[~tokens.inside].tolist())

    def _apart(self, text: str, whole: list[int]) -> TextTokens | None:
        """Tokenize the pieces between the beginnings of calls apart; None where that gives another text than `whole`.

        All tokens of ` [` begin where it begins. Where markers are `added` tokens, so do theirs.
        """
        parts, at = [], 0
        for mark, begin in self._marks(text):
            piece = self._after_start(text[at:begin]) if at else self.texts([text[:begin]])[0]
            ids = self._apart_tokens.get(mark, [])
            parts.append(TextTokens(piece.ids, piece.offsets + at, piece.inside))
            parts.append(TextTokens(ids, np.full(len(ids), begin, np.int32), np.zeros(len(ids), np.bool_)))
            at = begin + len(mark)
        ids = [token for part in parts for token in part.ids]
        if not self.added and self._text(ids) != self._text(whole):
            return None
        offsets, inside = ([getattr(part, name) for part in parts] for name in ("offsets", "inside"))
        return TextTokens(ids, np.concatenate(offsets), np.concatenate(inside))

    def _marks(self, text: str) -> Iterator[tuple[str, int]]:
        """Yield what has tokens of its own, with the character at which it begins, and the end of the text."""
        if self.added:
            yield from (place for place in marker_places(text, self.markers) if place[0] in self._apart_tokens)
        else:
            yield from ((match[0], match.start()) for match in self._begun.finditer(text))
        yield "", len(text)

    def _after_start(self, body: str) -> TextTokens:
        [tokens] = self.texts([body])
        for anchor in NAME_ANCHORS if self.anchor else ():
            cut, [anchored] = len(self._ids(anchor)), self.texts([anchor + body])
            if anchored.ids[:cut] == self._ids(anchor):
                return TextTokens(anchored.ids[cut:], anchored.offsets[cut:] - len(anchor), anchored.inside[cut:])
        return tokens

    def _appends_start(self, before: list[int], start: list[int]) -> bool:
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
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return list(full[: next(starts, 0)])


def _text_tokens(text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> TextTokens:
    starts, ends = np.array(spans, np.int32).reshape(-1, 2).T
    before = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1].astype(np.int32)
    for gap in () if text.isascii() else np.flatnonzero(before < starts):
        while before[gap] < starts[gap] and _combines(text[before[gap]]):
            before[gap] += 1
    return TextTokens(list(ids), np.minimum(starts, before), starts < before)


def _combines(character: str) -> bool:
    """Return whether it combines with the character before it: a combining mark, or a Hangul vowel or final."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"
