"""Encode texts and calls as the method's token sequences; decode sampled tokens to the text of a call."""

import unicodedata
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.weights import MARKERS_KEY, OffsetError
from toolformer_dag.settings.call_markers import CallMarkers
from toolformer_dag.texts.call_places import CallPlace, find_call_place_at_offset
from toolformer_dag.texts.calls import (
    PAPER_BEGIN_MARKER,
    build_call_opening_pattern,
    iter_marker_offsets,
    replace_paper_markers,
    restore_paper_markers,
)
from toolformer_dag.texts.input_ends import find_text_after_input

ANCHOR = "a"
"""A short text before which others are tokenized as inside a sequence; its tokens are then cut off."""
NAME_ANCHORS = ("a", ".", "0", "\n", "]")
"""Anchors before the name of a tool, in order of preference: a letter may merge with the name."""
OUTPUT_LABEL = "\nOutput: "
"""What stands between a text and its copy with calls."""


@dataclass(frozen=True, slots=True, eq=False)
class TextTokens:
    """The tokens x_0 to x_(n-1) of a text, and where they begin.

    The text "a 😀" may have token_ids [64, 30, 31], offsets [0, 1, 2] and starts_inside_character
    [False, False, True].

    Attributes:
        token_ids: Their numbers in the vocabulary.
        offsets: The character of the text at which each token begins, [n].
        starts_inside_character: Whether it begins inside a character, as the later bytes of an emoji do, [n]. No call
            can stand there.
    """

    token_ids: list[int]
    offsets: NDArray[np.int32]
    starts_inside_character: NDArray[np.bool_]

    def find_token_index(self, offset: int) -> int:
        """Find the token that begins at a character of the text.

        Returns:
            The index of the token.

        Raises:
            OffsetError: No token begins there. The error names the nearest character at which one does.
        """
        begins_at_offset = (self.offsets == offset) & ~self.starts_inside_character  # [n]
        token_indices = np.flatnonzero(begins_at_offset)
        if not len(token_indices):
            raise OffsetError(offset, self.find_nearest_boundary(offset))
        return int(token_indices[0])

    def find_call_place(self, text: str, char_offset: int) -> CallPlace | None:
        """Find out which tokens a call stands between if it is put before a character of the text.

        White space around the character makes no difference.

        Example:
            In `is 215` with the tokens `is`, ` `, `215`, the characters 2 and 3 give CallPlace(char_offset=2,
            sampling_token_index=1, position=2): the call is written and sampled before ` `, and judged from `215` on.

        Args:
            text: The text of these tokens.
            char_offset: The index of the character.

        Returns:
            The place. None if no token begins there, for example inside a word, if only white space follows, or if the
            character is outside the text.
        """
        # Tokens that begin inside a character are left out, because no call can stand before them.
        boundary_indices = np.flatnonzero(~self.starts_inside_character)
        place = find_call_place_at_offset(text, self.offsets[boundary_indices], char_offset)
        if place is None:
            return None

        # `place` counts only the tokens in `boundary_indices`, but the result counts all tokens.
        return CallPlace(
            place.char_offset,
            sampling_token_index=int(boundary_indices[place.sampling_token_index]),
            position=int(boundary_indices[place.position]),
        )

    def find_nearest_boundary(self, offset: int) -> int:
        """Find the character nearest to `offset` at which a token begins. It is 0 in a text without tokens."""
        boundary_offsets = self.offsets[~self.starts_inside_character]
        if not len(boundary_offsets):
            return 0
        nearest_index = np.argmin(np.abs(boundary_offsets - offset))
        return int(boundary_offsets[nearest_index])

    def slice_tokens(self, first_index: int, end_index: int | None = None) -> "TextTokens":
        """Return the tokens from `first_index` to the one before `end_index`, or to the last one if it is None."""
        return TextTokens(
            self.token_ids[first_index:end_index],
            self.offsets[first_index:end_index],
            self.starts_inside_character[first_index:end_index],
        )

    def shift_offsets(self, character_count: int) -> "TextTokens":
        """Return the tokens with `character_count` added to each offset."""
        return TextTokens(self.token_ids, self.offsets + character_count, self.starts_inside_character)


class Mark(NamedTuple):
    """A marker of a call in a text.

    Attributes:
        marker: The marker, such as ` [`, or "" for the mark at the end of the text.
        start: The index of the character at which it begins.
    """

    marker: str
    start: int

    @property
    def end(self) -> int:
        """Return the index of the character after the marker."""
        return self.start + len(self.marker)


class Encoding:
    """A fast tokenizer that encodes the parts of the method's sequences: prompts, texts and calls.

    Calls are passed in and returned in the paper's form, ` [Name(input) -> result]`, and tokenized with the model's
    `markers`. Texts of C* (the augmented texts for training) have these markers already. A text that holds the string
    of a special token, such as "<s>", gets the tokens of its characters.

    Attributes:
        tokenizer: A fast tokenizer of transformers.
        markers: The strings that open, divide and close a call, such as ` [`, ` ->` and `]`.
        added_marker_ids: The tokens of each marker that is an added token of the tokenizer, by marker.
        bos_ids: The tokens before a sequence, or none if the tokenizer adds none.
        eos_ids: The token after a sequence in a list, which is empty if the tokenizer has none.
        anchor: "a" for tokenizers that add a space before the first word (Llama 2), else "". What stands inside a
            sequence is tokenized after this text, whose tokens are then cut off.
        call_start_ids: The tokens of ` [`, or of another marker that opens a call. Every call begins with them, in
            prompts and C* as in sampling and decoding.
        output_label_ids: The tokens of a line break and "Output: ", which stand between a text and its copy with calls.
    """

    def __init__(self, tokenizer: Any, markers: CallMarkers | None = None) -> None:
        """Prepare a tokenizer, and tokenize the markers of calls, such as ` [`, as they stand inside a sequence.

        Args:
            tokenizer: A fast tokenizer of transformers.
            markers: The markers of calls. By default they come from the tokenizer's files, or else from the paper.
        """
        self.tokenizer = tokenizer
        self.markers = markers or CallMarkers(**tokenizer.init_kwargs.get(MARKERS_KEY, {}))
        self.added_marker_ids = _encode_added_markers(tokenizer, self.markers)
        self.bos_ids = _list_leading_special_tokens(tokenizer)
        self.eos_ids = _list_eos_ids(tokenizer)

        # Llama 2's tokenizer adds a space before the first word. What stands inside a sequence is tokenized after the
        # anchor "a", whose ids are cut off again. Other tokenizers need no anchor: it is "".
        self.anchor = self._choose_anchor()
        self._anchor_ids: list[int] = self._encode_piece(self.anchor) if self.anchor else []

        begin_ids, self.output_label_ids = self._encode_inside_sequence([self.markers.begin, OUTPUT_LABEL])
        self.call_start_ids = self.added_marker_ids.get(self.markers.begin, begin_ids)

        # This matches ` [` only where it opens a call.
        self._call_opening_pattern = build_call_opening_pattern(None, self.markers.begin)
        # These markers are tokenized apart from the text around them.
        self._ids_by_marker = {self.markers.begin: self.call_start_ids, **self.added_marker_ids}
        # A sampled call ends with one of these.
        self._end_markers: tuple[str, ...] = (self.markers.end,)

    def _choose_anchor(self) -> str:
        """Return "a" if the tokenizer adds a space to a ` [` that stands alone, as Llama 2's does, else ""."""
        anchor_ids = self._encode_piece(ANCHOR)
        marker_ids = self._encode_piece(PAPER_BEGIN_MARKER)
        needs_no_anchor = self._can_append_call_start(anchor_ids, marker_ids)
        return "" if needs_no_anchor else ANCHOR

    def encode_prompt(self, prompt: str) -> list[int]:
        """Tokenize `prompt` and "Input: " after it. BOS comes first if the tokenizer adds it.

        Calls in the prompt are written with the model's markers.
        """
        prompt_text = replace_paper_markers(f"{prompt}Input: ", self.markers)
        [prompt_tokens] = self.encode_texts_with_calls([prompt_text])
        return self.bos_ids + prompt_tokens.token_ids

    def encode_texts(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts without special tokens, and note the character at which each token begins.

        If the tokenizer drops a character, it counts as part of the next token. If it merges an accent into a letter,
        the accent counts as part of the letter's token.
        """
        if not texts:
            return []

        encoded = self._tokenize(texts, return_offsets_mapping=True)
        spans_by_text = encoded.offset_mapping  # for each text, the start and the end character of each token
        return [
            _build_text_tokens(text, token_ids, token_spans)
            for text, token_ids, token_spans in zip(texts, encoded.input_ids, spans_by_text, strict=True)
        ]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text. This is twice as fast as `encode_texts`, because it skips the offsets."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding.ids) for encoding in encodings]

    def encode_calls(self, call_texts: Sequence[str]) -> list[list[int]]:
        """Tokenize calls with the model's markers.

        Args:
            call_texts: Calls in the paper's form, with or without a result, such as " [Calculator(2+3) -> 5]".

        Returns:
            The tokens of each call. They begin with `call_start_ids`, the tokens of ` [`, if that is possible.
        """
        if not call_texts:
            return []
        written_calls = [replace_paper_markers(call, self.markers) for call in call_texts]

        # A call tokenized in one piece may begin with another token, such as " [C". It is then tokenized in parts.
        unsplit_ids_by_call = self._encode_inside_sequence(written_calls)
        return [
            self._split_call_if_needed(call, unsplit_ids)
            for call, unsplit_ids in zip(written_calls, unsplit_ids_by_call, strict=True)
        ]

    def _split_call_if_needed(self, call_text: str, unsplit_ids: list[int]) -> list[int]:
        """Return the tokens of a call so that they begin with those of ` [` (`call_start_ids`).

        If the tokenizer joins the bracket with what follows, as in " [A", the call is cut after it and the pieces are
        tokenized. If these would decode to another text, `unsplit_ids` are returned.

        Args:
            call_text: The call, with the model's markers.
            unsplit_ids: Its tokens when it is tokenized in one piece.
        """
        if not self._needs_split(call_text, unsplit_ids):
            return unsplit_ids
        split_tokens = self._encode_in_parts(call_text, unsplit_ids)
        return unsplit_ids if split_tokens is None else split_tokens.token_ids

    def encode_texts_with_calls(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts that may contain calls, written with the model's markers as in the training texts.

        A call gets the same tokens as in sampling and decoding: no token spans a marker such as ` [` and the text
        beside it. The exception is a text that would decode to another one if it were cut there.
        """
        unsplit_tokens_by_text = self.encode_texts(texts)
        return [
            self._split_text_if_needed(text, unsplit_tokens)
            for text, unsplit_tokens in zip(texts, unsplit_tokens_by_text, strict=True)
        ]

    def _split_text_if_needed(self, text: str, unsplit_tokens: TextTokens) -> TextTokens:
        """Return the tokens of a text that may contain calls, so that the ` [` of a call has tokens of its own.

        If a token such as " [A" spans more, the text is cut at its markers, and the pieces are tokenized. If these
        pieces would decode to another text, `unsplit_tokens` are returned.

        Args:
            text: The text, with the model's markers.
            unsplit_tokens: Its tokens when it is tokenized in one piece.
        """
        if self._are_markers_apart(text, unsplit_tokens):
            return unsplit_tokens
        return self._encode_in_parts(text, unsplit_tokens.token_ids) or unsplit_tokens

    def has_stable_text_tokens(self) -> bool:
        """Return whether the tokens of a text stay the same when ` [` or "Output: " is appended to it.

        If not, no call can be tokenized apart from its text, and the tokenizer cannot be used. This is only tried with
        tokenizers that add a space before a first word. They have an anchor, such as "a", which is the text of the
        trial. For others the answer is True.
        """
        if not self.anchor:
            return True

        [marker_ids] = self._encode_inside_sequence([PAPER_BEGIN_MARKER])
        for appended_text, appended_ids in (
            (PAPER_BEGIN_MARKER, marker_ids),
            (OUTPUT_LABEL, self.output_label_ids),
        ):
            joined_ids = self._encode_piece(self.anchor + appended_text)
            if joined_ids != self._anchor_ids + appended_ids:
                return False

        # Decoding has to agree too: the tokens of ` [` may add nothing else to the text, such as a second space.
        return self._can_append_call_start(self._anchor_ids, marker_ids)

    def decode_call_body(self, sampled_ids: Sequence[int]) -> str | None:
        """Cut the call out of what a model wrote after " [".

        A "]" within named arguments, as in 'W(city="a]")', is not its end. In `encoding_ending_before_results`, "->"
        is an end as well. A model's own markers are replaced by the paper's: " [", " -> " and "]".

        Args:
            sampled_ids: The tokens after " [".

        Returns:
            The text of the call, such as "Calculator(2+3)" for "Calculator(2+3)] and", or None if the call has no end.
        """
        # Decode the sample with the tokens of " [" before it, as the model read it, and cut off the text of these.
        text = self._decode([*self.call_start_ids, *sampled_ids])
        begin_marker = self.markers.begin.strip()
        call_text = text[text.index(begin_marker) + len(begin_marker) :]

        end_index = self._find_call_end(call_text)
        if end_index is None:
            return None
        return restore_paper_markers(call_text[:end_index], self.markers)

    def _find_call_end(self, text: str) -> int | None:
        """Find the character at which the first marker after a call's input begins.

        Args:
            text: The text after the marker that opens the call, such as "Calculator(2+3)] and".

        Returns:
            The index of the character (15 in this example), or None if there is no such marker.
        """
        end_indices = []
        for marker in self._end_markers:
            index = find_text_after_input(marker.strip(), text)
            if index >= 0:  # it is -1 if the text does not have the marker
                end_indices.append(index)
        return min(end_indices, default=None)

    @cached_property
    def encoding_ending_before_results(self) -> "Encoding":
        """Return a copy of this encoding whose samples also end at "->".

        It is for models that were finetuned on calls with results: after "->", they would write a result that no tool
        returned.
        """
        encoding = copy(self)
        # The cached property holds the tokens for the original's markers.
        encoding.__dict__.pop("_ending_tokens", None)
        encoding._end_markers = (*self._end_markers, self.markers.arrow)
        return encoding

    def has_sample_ended(self, sampled_ids: Sequence[int]) -> bool:
        """Return whether a sample is complete: it holds a whole call, or its last token is EOS."""
        if sampled_ids[-1] in self.eos_ids:
            return True
        return self.decode_call_body(sampled_ids) is not None

    def can_end_sample(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Check for each token whether it may end a sample. Ids beyond the vocabulary may not.

        Returns:
            Booleans in the shape of `token_ids`.
        """
        return np.isin(token_ids, self._ending_tokens)

    @cached_property
    def _ending_tokens(self) -> list[int]:
        """List the tokens with which a sample may end: EOS, and all that may complete a marker such as "]"."""
        single_token_sequences = [[token_id] for token_id in range(len(self.tokenizer))]
        token_texts = self.tokenizer.batch_decode(single_token_sequences)

        ending_ids = list(self.eos_ids)
        for marker in self._end_markers:
            # If the marker is an added token of the tokenizer, only this token completes it.
            added_ids = self.added_marker_ids.get(marker)
            ending_ids += added_ids or _list_completing_token_ids(marker.strip(), token_texts)
        return ending_ids

    def _encode_inside_sequence(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each piece as it stands inside a sequence, not at its beginning."""
        encoded = self._tokenize([self.anchor + piece for piece in pieces])
        anchor_length = len(self._anchor_ids)
        return [list(token_ids[anchor_length:]) for token_ids in encoded.input_ids]

    def _needs_split(self, call_text: str, call_ids: list[int]) -> bool:
        """Return whether a call has to be tokenized in parts, because its tokens do not begin with `call_start_ids`.

        If some markers are added tokens of the tokenizer, this is true for every call: only `_encode_in_parts` writes
        these tokens.

        Args:
            call_text: The call, with the model's markers.
            call_ids: Its tokens when it is tokenized in one piece.
        """
        is_call = self._call_opening_pattern.match(call_text) is not None
        if not is_call:
            return False
        if self.added_marker_ids:
            return True
        return call_ids[: len(self.call_start_ids)] != self.call_start_ids

    def _are_markers_apart(self, text: str, text_tokens: TextTokens) -> bool:
        """Return whether a text's tokens keep each ` [` that opens a call apart from the text beside it.

        A token such as " [A" would not. If some markers are added tokens of the tokenizer, the answer is False for
        every text with calls: only `_encode_in_parts` writes these tokens.
        """
        opening_bounds: set[int] = set()  # the characters at which a ` [` begins or ends
        for match in self._call_opening_pattern.finditer(text):
            opening_bounds.update(match.span())
        if not opening_bounds:
            return True
        if self.added_marker_ids:
            return False

        # A token has to begin at each of these characters.
        boundary_offsets = text_tokens.offsets[~text_tokens.starts_inside_character]
        return opening_bounds <= set(boundary_offsets.tolist())

    def _encode_in_parts(self, text: str, unsplit_ids: list[int]) -> TextTokens | None:
        """Tokenize a text with calls piece by piece, such as "is", " [" and "A(1)] so", and join the tokens.

        Args:
            text: The text.
            unsplit_ids: The tokens of the same text without cuts.

        Returns:
            The tokens, or None if they decode to another text than `unsplit_ids`. This is not checked if some
            markers are added tokens of the tokenizer, because only the pieces contain these tokens.
        """
        split_tokens = _join_token_parts(self._encode_parts(text))
        if self.added_marker_ids:  # the tokens without cuts lack the markers' own tokens
            return split_tokens

        is_same_text = self._decode(split_tokens.token_ids) == self._decode(unsplit_ids)
        return split_tokens if is_same_text else None

    def _encode_parts(self, text: str) -> list[TextTokens]:
        """Cut a text at its markers, and tokenize each marker and each text between two markers, in order."""
        parts = []
        part_start = 0
        for mark in self._iter_marks(text):  # the last mark is empty, at the end of the text
            text_before_mark = text[part_start : mark.start]
            tokens_before_mark = self._encode_text_between(text_before_mark, is_first=part_start == 0)

            # Offsets count from the beginning of the whole text.
            parts.append(tokens_before_mark.shift_offsets(part_start))
            parts.append(self._encode_marker(mark))
            part_start = mark.end
        return parts

    def _encode_text_between(self, text: str, is_first: bool) -> TextTokens:
        """Tokenize the text between two markers or, if `is_first`, before the first marker."""
        if not is_first:
            return self._encode_after_marker(text)
        [tokens] = self.encode_texts([text])
        return tokens

    def _encode_marker(self, mark: Mark) -> TextTokens:
        """Tokenize a marker. All its tokens get its first character as their offset.

        Returns:
            The tokens, or none for the empty marker at the end of a text.
        """
        marker_ids = self._ids_by_marker.get(mark.marker, [])
        return TextTokens(
            marker_ids,
            offsets=np.full(len(marker_ids), mark.start, np.int32),
            starts_inside_character=np.zeros(len(marker_ids), np.bool_),
        )

    def _iter_marks(self, text: str) -> Iterator[Mark]:
        """Find the markers of calls (` [`, `->`, `]`) at which a text is cut before it is tokenized.

        Yields:
            The markers in order, and last an empty one at the end of the text.
        """
        if self.added_marker_ids:  # ` [`, and all markers that are added tokens of the tokenizer
            for marker, start in iter_marker_offsets(text, self.markers):
                if marker in self._ids_by_marker:
                    yield Mark(marker, start)
        else:  # only the ` [` of each call
            for match in self._call_opening_pattern.finditer(text):
                yield Mark(match[0], match.start())

        yield Mark("", len(text))

    def _encode_after_marker(self, text: str) -> TextTokens:
        """Tokenize the text after a marker such as ` [`, without the space that some tokenizers add to a first word.

        These have an `anchor`. For them the text is tokenized after another short text, whose tokens are then cut off:
        the first of NAME_ANCHORS that has no token in common with it. If there is none, the space stays.
        """
        if self.anchor:  # the tokenizer adds a space before a first word
            for anchor in NAME_ANCHORS:
                tokens = self._encode_after_anchor(text, anchor=anchor)
                if tokens is not None:
                    return tokens

        [tokens_without_anchor] = self.encode_texts([text])
        return tokens_without_anchor

    def _encode_after_anchor(self, text: str, *, anchor: str) -> TextTokens | None:
        """Tokenize a text as it stands inside a sequence, without a space that a tokenizer adds to its first word.

        For this it is tokenized after another text, the anchor, whose tokens are then cut off.

        Returns:
            The tokens of the text, or None if a token spans anchor and text.
        """
        anchor_ids = self._encode_piece(anchor)
        [anchored_tokens] = self.encode_texts([anchor + text])
        if anchored_tokens.token_ids[: len(anchor_ids)] != anchor_ids:
            return None

        tokens = anchored_tokens.slice_tokens(len(anchor_ids))
        return tokens.shift_offsets(-len(anchor))

    def _can_append_call_start(self, ids_before: list[int], call_start_ids: list[int]) -> bool:
        """Return whether `call_start_ids` after `ids_before` add exactly ` [` to the decoded text."""
        joined_text = self._decode(ids_before + call_start_ids)
        return joined_text == self._decode(ids_before) + PAPER_BEGIN_MARKER

    def _encode_piece(self, piece: str) -> list[int]:
        """Tokenize a piece of text that stands alone."""
        return list(self._tokenize([piece]).input_ids[0])

    def _tokenize(self, texts: Sequence[str], **options: Any) -> Any:
        """Call the tokenizer on texts, without special tokens, and return its output.

        Args:
            texts: The texts.
            options: More arguments for the tokenizer.
        """
        return self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False, **options
        )

    def _decode(self, token_ids: list[int]) -> str:
        """Decode tokens to their text, special tokens included."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _list_eos_ids(tokenizer: Any) -> list[int]:
    """Return the token that ends a sequence in a list, which is empty if the tokenizer has none."""
    eos_id = tokenizer.eos_token_id
    return [] if eos_id is None else [int(eos_id)]


def _list_completing_token_ids(marker: str, token_texts: Sequence[str]) -> list[int]:
    """List the tokens that may complete a marker at the end of a sample.

    Their text holds the marker, as ")]" holds "]", or begins with the last part of it: the marker "->" may be written
    with two tokens, "-" and ">".

    Args:
        marker: The marker, such as "]".
        token_texts: The text of each token of the vocabulary.
    """
    marker_tails = tuple(marker[cut:] for cut in range(1, len(marker)))  # (">",) for "->"

    completing_ids = []
    for token_id, token_text in enumerate(token_texts):
        if marker in token_text or token_text.startswith(marker_tails):
            completing_ids.append(token_id)
    return completing_ids


def _encode_added_markers(tokenizer: Any, markers: CallMarkers) -> dict[str, list[int]]:
    """Find the markers of calls that are added tokens of the tokenizer, and return the tokens of each by marker.

    An added token is a word that was put into the vocabulary as a whole. The paper's markers mostly are none: ` [` is
    ordinary text, and then the result is empty.
    """
    added_vocabulary = tokenizer.get_added_vocab()

    ids_by_marker = {}
    for _, marker in markers:  # pairs of a setting's name and its marker, such as ("begin", " [")
        if marker.strip() in added_vocabulary:
            encoded = tokenizer(marker, add_special_tokens=False, split_special_tokens=False)
            ids_by_marker[marker] = encoded.input_ids
    return ids_by_marker


def _list_leading_special_tokens(tokenizer: Any) -> list[int]:
    """List the tokens that the tokenizer puts before a text, such as [1] for a tokenizer whose BOS is token 1."""
    text_ids = tokenizer("a", add_special_tokens=False).input_ids
    all_ids = tokenizer("a").input_ids

    # Look for the first index at which the text's own tokens begin.
    for start_index in range(len(all_ids)):
        if all_ids[start_index : start_index + len(text_ids)] == text_ids:
            return list(all_ids[:start_index])
    return []


def _join_token_parts(token_parts: Sequence[TextTokens]) -> TextTokens:
    """Join the tokens of all parts of a text. Their offsets already count from the beginning of the text."""
    token_ids = [token_id for part in token_parts for token_id in part.token_ids]
    offsets = np.concatenate([part.offsets for part in token_parts])
    starts_inside_character = np.concatenate([part.starts_inside_character for part in token_parts])
    return TextTokens(token_ids, offsets, starts_inside_character)


def _build_text_tokens(text: str, token_ids: list[int], token_spans: Sequence[tuple[int, int]]) -> TextTokens:
    """Combine the tokens of a text with the places where they begin, so that every character belongs to a token.

    Args:
        text: The text.
        token_ids: Its tokens.
        token_spans: The first character of each token and the character after its last one, from the tokenizer. They
            leave gaps where the tokenizer drops characters, and overlap where one character is several tokens.
    """
    # For example, the tokenizer drops characters 1 and 2, and writes character 3 in two tokens:
    #   token_spans              (0, 1)  (3, 4)  (3, 4)
    #   previous_ends            0       1       4       where the tokens before it end
    #   offsets                  0       1       3       the dropped characters belong to the second token
    #   starts_inside_character  False   False   True    the third token begins inside a character

    token_starts, token_ends = np.array(token_spans, np.int32).reshape(-1, 2).T  # [n] each
    previous_ends = _compute_previous_ends(token_ends)  # [n]
    if not text.isascii():
        # A dropped accent belongs to the letter before it, not to the next token.
        previous_ends = _move_ends_after_accents(text, token_starts, previous_ends)

    return TextTokens(
        list(token_ids),
        offsets=np.minimum(token_starts, previous_ends),
        starts_inside_character=token_starts < previous_ends,
    )


def _compute_previous_ends(token_ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Compute for each token the character after all earlier tokens, [n]. It is 0 for the first token.

    Args:
        token_ends: The character after each token, [n].
    """
    largest_ends = np.concatenate([[0], np.maximum.accumulate(token_ends)])  # [n + 1]
    return largest_ends[:-1].astype(np.int32)


def _move_ends_after_accents(
    text: str, token_starts: NDArray[np.int32], previous_ends: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Move each of `previous_ends` behind the accents that the tokenizer dropped there.

    A tokenizer that merges accents into letters (NFC) may report only the letter as the characters of a token. The
    accents belong to this letter, not to the next token: in "e", accent, "a", the first token ends at 2 instead of 1.

    Args:
        text: The text.
        token_starts: The first character of each token, [n].
        previous_ends: The character after all earlier tokens, for each token, [n].

    Returns:
        A changed copy of `previous_ends`.
    """
    moved_ends = previous_ends.copy()
    # Before these tokens there is a gap, in which the tokenizer dropped characters.
    for token_index in np.flatnonzero(previous_ends < token_starts):
        gap_start = int(previous_ends[token_index])
        gap_end = int(token_starts[token_index])
        moved_ends[token_index] = _find_end_of_accents(text, start=gap_start, end=gap_end)
    return moved_ends


def _find_end_of_accents(text: str, *, start: int, end: int) -> int:
    """Return the index of the first character from `start` on that is no accent, or `end` if all before it are."""
    index = start
    while index < end and _is_combining(text[index]):
        index += 1
    return index


def _is_combining(character: str) -> bool:
    """Return whether a character belongs to the one before it: a combining mark, or a Hangul vowel or final."""
    is_mark = unicodedata.category(character).startswith("M")
    is_hangul_vowel_or_final = "\u1160" <= character <= "\u11ff"
    return is_mark or is_hangul_vowel_or_final
