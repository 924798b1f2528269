"""Other markers of calls in the model: their tokens, p of the first one, samples and losses against the definitions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.language_model.conftest import PROMPT, TEXTS
from tests.tiny_models import TOKENIZERS, save, tiny_model, tokenizer_of
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import ModelError, load_encoding, load_model
from toolformer_dag.model.requests import LossRequest, ProposalRequest, generate_uniforms
from toolformer_dag.model.weights import CHECKPOINT_FILE_NAME, MARKERS_KEY, check_call_markers
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings

SPECIAL = CallMarkers(begin="<tool_call>", arrow="<tool_response>", end="</tool_call>")
TEXTUAL = CallMarkers(begin=" {{", arrow=" => ", end="}}")
CALLS = [("Add", "35 + 26", "61"), ("QA", "¿dónde? 中", "a b"), ("Calendar", "", "")]


def with_markers(kind: str, markers: CallMarkers, special: bool = True) -> Any:
    """A tokenizer that tells the markers, which are tokens of it where they look like tags."""
    tokenizer = tokenizer_of(kind)
    tags = [marker for _, marker in markers if marker.startswith("<")]
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    tokenizer.init_kwargs[MARKERS_KEY] = markers.model_dump()
    return tokenizer


@dataclass
class Written:
    """The definitions with the tokens of pieces: markers that are tokens, and the text between them."""

    model: Any
    tokenizer: Any
    markers: CallMarkers

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def call(self, tool: str, asked: str, result: str | None) -> list[int]:
        """e(c) or e(c, r): the opening marker apart; the others apart where they are tokens."""
        begin, arrow, end = (marker for _, marker in self.markers)
        answer = "" if result is None else f"{arrow}{result}"
        if self.markers != SPECIAL:
            return self.ids(begin) + self.ids(f"{tool}({asked}){answer}{end}")
        one, two, three = self.tokenizer.convert_tokens_to_ids([begin, arrow, end])
        answered = [] if result is None else [two, *self.ids(result)]
        return [one, *self.ids(f"{tool}({asked})"), *answered, three]

    @torch.no_grad()
    def log_probabilities(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        return self.model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1).double().numpy()

    def loss(self, text: str, i: int, z: list[int]) -> float:
        x = self.ids(text)
        total = sum(max(0.0, 1 - 0.2 * t) for t in range(100))
        rows = self.log_probabilities(z + x)
        terms = ((max(0.0, 1 - 0.2 * (j - i)) / total, rows[len(z) + j - 1, x[j]]) for j in range(max(i, 1), len(x)))
        if not z:
            terms = ((max(0.0, 1 - 0.2 * (j - i)) / total, rows[j - 1, x[j]]) for j in range(max(i, 1), len(x)))
        return float(-sum(weight * value for weight, value in terms))


@pytest.fixture(params=[SPECIAL, TEXTUAL], ids=["tokens", "text"])
def written(request: pytest.FixtureRequest) -> tuple[Engine, Written]:
    tokenizer = with_markers("merged", request.param)
    language_model = tiny_model("GPT-2", tokenizer)
    return Engine(language_model), Written(language_model.model, tokenizer, request.param)


def test_losses_are_those_behind_calls_in_the_model_s_markers(written: tuple[Engine, Written]) -> None:
    engine, by_hand = written
    requests = [LossRequest(text, i, *call) for text in TEXTS for i in (0, 2) for call in CALLS if text != "a"]
    for request, found in zip(requests, engine.losses(requests), strict=True):
        text = request.text
        i = request.position
        call = (request.tool, request.input)
        z = [[], by_hand.call(*call, None), by_hand.call(*call, request.result)]
        expected = [by_hand.loss(text, i, one) for one in z]
        assert [found.loss_empty, found.loss_call, found.loss_result] == pytest.approx(expected, abs=1e-5)


def test_p_and_samples_are_those_behind_a_prompt_in_the_model_s_markers(written: tuple[Engine, Written]) -> None:
    engine, by_hand = written
    text = TEXTS[0]
    sampling = SamplingSettings(max_call_tokens=8)
    [found] = engine.propose(PROMPT, [ProposalRequest(text, "d")], tau_s=0.0, k=2, m=3, sampling=sampling)
    begin = by_hand.markers.begin
    start = engine.encoding.call_start_ids
    example = by_hand.call("Add", "1 + 2", None)
    rest = " 3.\nInput: "
    head = [*by_hand.ids("Add calls.\nInput: 1 + 2 is 3.\nOutput: 1 + 2 is"), *example, *by_hand.ids(rest)]
    if by_hand.markers == TEXTUAL:  # the end of the call and what follows it are a text
        head = by_hand.ids("Add calls.\nInput: 1 + 2 is 3.\nOutput: 1 + 2 is") + start
        head += by_hand.ids("Add(1 + 2)}}" + rest)
    assert engine.encoding.encode_prompt(PROMPT) == head
    x = by_hand.ids(text)
    before = [*head, *x, *by_hand.ids("\nOutput: ")]
    for i in range(0, len(x), 5):
        rows = by_hand.log_probabilities([*before, *x[:i], *start])
        p = np.exp(sum(rows[len(before) + i - 1 + t, token] for t, token in enumerate(start)))
        assert found.probabilities[i] == pytest.approx(p, rel=1e-3)
    assert len(found.samples) == 6 and begin.strip() in by_hand.tokenizer.decode(start)
    for sample in found.samples:
        drawn: list[int] = []
        for uniform in generate_uniforms(0, "d", sample.position, sample.sample_number, 8):
            row = by_hand.log_probabilities([*before, *x[: sample.position], *start, *drawn])[-1]
            drawn.append(int(np.searchsorted(np.cumsum(np.exp(row)), uniform, side="right")))
            if engine.encoding.has_sample_ended(drawn):
                break
        assert sample.body == engine.encoding.decode_call_body(drawn)


PIECES = ["so", " it", "<tool_call>", "</tool_call>", "<tool_response>", "QA(", ")", ".", "中", " [QA(1)]", "\n"]
INSIDE = st.lists(st.sampled_from(["a", " b", "<tool_call>", "5", "中"]), max_size=4).map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), INSIDE, INSIDE)
def test_markers_that_are_tokens_stand_in_calls_alone(kind: str, text: str, asked: str, result: str) -> None:
    encoding = _encoding(kind)
    tokens = [encoding.added_marker_ids[marker][0] for _, marker in SPECIAL]
    assert not set(tokens) & set(encoding.encode_texts([text])[0].token_ids)
    call = f'<tool_call>QA(a="{asked}")<tool_response>{result}</tool_call>'
    [found] = encoding.encode_texts_with_calls([f"it is{call} so."])
    begun = [(found.token_ids.index(token), token) for token in tokens]
    assert [token for token in found.token_ids if token in tokens] == tokens and begun == sorted(begun)
    [alone] = encoding.encode_calls([f' [QA(a="{asked}") -> {result}]'])
    [chain] = encoding.encode_calls([f' [QA(a="{asked}") -> {result}]' * 2])
    assert chain == alone * 2
    first = begun[0][0]
    assert (
        found.token_ids[first : first + len(alone)] == alone
        and found.token_ids[:first] == encoding.encode_texts(["it is"])[0].token_ids
    )
    places = [5, 5 + call.index('")<tool_response>') + 2, 5 + len(call) - len("</tool_call>")]
    assert [int(found.offsets[at]) for at, _ in begun] == places


@cache
def _encoding(kind: str) -> Encoding:
    return Encoding(with_markers(kind, SPECIAL))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("markers", [SPECIAL, TEXTUAL], ids=["tokens", "text"])
@pytest.mark.parametrize("special", [True, False])
def test_a_sample_ends_with_the_marker_and_is_read_in_the_paper_s_form(
    kind: str, markers: CallMarkers, special: bool
) -> None:
    encoding = Encoding(with_markers(kind, markers, special))
    start = len(encoding.call_start_ids)
    [sampled] = (ids[start:] for ids in encoding.encode_calls([" [QA(who is it?)]"]))
    assert encoding.decode_call_body(sampled) == "QA(who is it?)" and encoding.has_sample_ended(sampled)
    assert encoding.can_end_sample(np.array(sampled))[-1] and not encoding.has_sample_ended(sampled[:-1])
    if special or kind != "prepended":  # which puts a space after every token that was added, in any text
        [named] = (ids[start:] for ids in encoding.encode_calls([f' [W(city="{markers.end}", at="->")]']))
        assert encoding.decode_call_body(named) == f'W(city="{markers.end}", at="->")'
    [answered] = (ids[start:] for ids in encoding.encode_calls([" [QA(1) -> 2]"]))
    assert str(encoding.decode_call_body(answered)).replace(" ", "") == "QA(1)->2"


def test_a_checkpoint_s_folder_tells_its_markers(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("merged")
    tokenizer.add_tokens([AddedToken(marker, special=True, normalized=False) for _, marker in SPECIAL])
    base = ModelSettings(name=save(tiny_model("GPT-2", tokenizer), tmp_path / "base"), device="cpu", markers=SPECIAL)
    assert load_encoding(base).markers == SPECIAL
    load_encoding(base).tokenizer.save_pretrained(tmp_path / "told")
    assert json.loads((tmp_path / "told/tokenizer_config.json").read_text())[MARKERS_KEY] == SPECIAL.model_dump()
    told = save(load_model(base), tmp_path / "told")
    plain = ModelSettings(name=base.name, device="cpu")
    assert load_model(plain, told).encoding.markers == SPECIAL
    assert load_model(plain.model_copy(update={"markers": TEXTUAL}), told).encoding.markers == SPECIAL
    with pytest.raises(ModelError, match=r"was finetuned with other markers of calls; set \[model\] markers to"):
        check_call_markers(ModelSettings(name=told))
    check_call_markers(ModelSettings(name=told, markers=SPECIAL))
    check_call_markers(base)
    assert load_encoding(ModelSettings(name=told, markers=SPECIAL)).call_start_ids == load_encoding(base).call_start_ids


def test_another_model_has_the_settings_markers_and_a_checkpoint_without_any_the_paper_s(tmp_path: Path) -> None:
    names = [save(tiny_model("GPT-2", tokenizer_of("merged")), tmp_path / name) for name in ("base", "other", "ours")]
    (tmp_path / "ours" / CHECKPOINT_FILE_NAME).write_text("{}")
    base = ModelSettings(name=names[0], device="cpu", markers=TEXTUAL)
    found = [load_model(base, name).encoding.markers for name in names]
    assert found == [TEXTUAL, TEXTUAL, PAPER_MARKERS]
    with pytest.raises(ModelError, match="was finetuned with other markers"):
        check_call_markers(base.model_copy(update={"name": names[2]}))


def test_markers_that_a_tokenizer_cannot_write_are_refused(tmp_path: Path) -> None:
    name = save(tiny_model("Llama", tokenizer_of("bos")), tmp_path / "base")
    content = json.loads((tmp_path / "base/tokenizer.json").read_text())
    content["model"]["byte_fallback"] = False
    content["model"]["vocab"] = {token: at for token, at in content["model"]["vocab"].items() if "<0x" not in token}
    (tmp_path / "base/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"cannot write 'a ⟦|cannot write '⟦a\(1\)"):
        load_encoding(ModelSettings(name=name, markers=CallMarkers(begin=" ⟦", end="⟧")))
