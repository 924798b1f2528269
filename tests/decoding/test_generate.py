"""Decoding with tools against a slow reference, on random models and on one that has learnt to misbehave."""

import codecs
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.decoded import generate
from tests.decoding.conftest import teach
from toolformer_dag.decoding.generation import DecodedCall, Generation, format_decoded_call
from toolformer_dag.decoding.vocabulary import Vocabulary
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult


class Adder(Tool):
    """Adds two numbers."""

    name = "Calculator"
    version = "1"
    defaults = ToolDefaults(0.0, 20, 10, 0.5)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [self._add(call.input.split(" + ")) for call in calls]

    def _add(self, terms: list[str]) -> ToolResult:
        if not all(term.isdigit() for term in terms):
            return ToolResult(None, "not_a_sum")
        return ToolResult(str(sum(map(int, terms))))


class Today(Tool):
    """Gives the date that the prompt came with."""

    name = "Calendar"
    version = "1"
    defaults = ToolDefaults(0.0, 20, 10, 0.5)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(f"Today is {call.context}.") for call in calls]


class Dead(Tool):
    """A search whose index is gone."""

    name = "WikiSearch"
    version = "1"
    defaults = ToolDefaults(0.0, 20, 10, 0.5)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        raise ToolDown("[tools.wiki_search]: the index is gone; build it again")


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Adder("calculator", ToolOptions(), ""),
        Today("calendar", ToolOptions(), ""),
        Dead("s", ToolOptions(), ""),
    )
}

SCRIPTS = {
    "Bo had 3 and 4, so": " [Calculator(3 + 4) -> 7] 7 in all.",
    "Di had 3 and some, so": " [Calculator(3 + x) -> 9] nobody knows.",
    "A town named Foo": " [Maps(Foo) -> far] is far away.",
    "A stray bracket": " [see the note -> below] was here.",
    "No arrow and": " [Calculator(1 + 1)] still it goes on.",
    "No end, there were": " [Calculator(" + "1 + " * 20,
    "The end is": " [Calculator(2 + 2",
    "Twice, first": " [Calculator(1 + 2) -> 3] 3 and then [Calculator(2 + 3) -> 5] 5.",
    "It is now": " [Calendar() -> Today is Monday.] Monday.",
    "About Oslo": " [WikiSearch(Oslo) -> a city] it is a city.",
    "In other signs": " so<Calculator(2 + 2) -> 4> 4 in all.",
    "Closed again": " [Calculator(1 + 1) -> 2] 2] in all.",
    "No call here": " at all, only words.",
}
PROMPTS = list(SCRIPTS)
LOOK_ALIKE = r"(?:[(\[{<]\s*)+(?:Calculator|Calendar|WikiSearch)\("
KINDS = ("()", "[]", "{}", "<>")


def unopened(text: str, opening: str, closing: str) -> int:
    """Count the closing brackets of a kind that close nothing."""
    signs = "".join(sign for sign in text if sign in (opening, closing))
    while opening + closing in signs:
        signs = signs.replace(opening + closing, "")
    return signs.count(closing)


@dataclass
class Reference:
    """One row, no cache, no batch: what section 4.2 says, step by step."""

    model: LanguageModel
    tools: Mapping[str, Tool]
    k: int
    withheld: frozenset[str]
    new: int
    call_tokens: int
    calls: int = 1
    least: Mapping[str, float] = field(default_factory=dict)

    def run(self, prompt: str, context: str) -> Generation:
        tokenizer = self.model.tokenizer
        self.start = tokenizer(" [", add_special_tokens=False).input_ids
        ids = tokenizer(prompt).input_ids
        text = plain = ""
        made: list[DecodedCall] = []
        tokens = 0
        left = self.new
        self.look_alikes = 0
        refused = False
        while True:
            names = set(self.tools) - self.withheld
            may_call = self.k > 0 and bool(names) and len(made) < self.calls
            written, calls = self.write(ids, left, may_call, after_call=bool(made), refused=refused)
            head = self.text(ids, written)
            text = text + head
            plain = plain + head
            tokens = tokens + len(written)
            left = left - len(written)
            ids = ids + written
            found = None
            likely = self.callable(ids)
            refused = False
            while calls and names and found is None:
                body = self.call(ids + self.start, names & likely if names < set(self.tools) - self.withheld else names)
                named = self.named(body)
                refused = named is not None and self.text(self.start, body[:named]).partition("(")[0] not in likely
                if refused:
                    tokens += len(self.start) + (named or 0)
                    break
                tokens += len(self.start) + len(body)
                made.append(self.answer(self.closed(ids + self.start, body), context))
                if any(one.result is not None and one == made[-1] for one in made[:-1]):
                    made[-1] = DecodedCall(made[-1].tool, made[-1].input, None, "repeated_call")
                    refused = True
                    break
                found = made[-1].result
                names = names - {made[-1].tool} if made[-1].tool else set()
                calls = len(made) < self.calls
            if refused:
                continue
            if found is None:
                return Generation(text, plain, tuple(made), tokens, None, self.look_alikes)
            inserted = f" [{made[-1].tool}({made[-1].input}) -> {found}]"
            text += inserted
            ids = ids + tokenizer(inserted, add_special_tokens=False).input_ids

    def named(self, body: list[int]) -> int | None:
        """How many tokens of a call write its name with the bracket."""
        return next((at for at in range(len(body) + 1) if "(" in self.text(self.start, body[:at])), None)

    def write(
        self, ids: list[int], budget: int, may_call: bool, after_call: bool, refused: bool
    ) -> tuple[list[int], bool]:
        written: list[int] = []
        begun = 0
        bare = -1
        while len(written) < budget:
            scores = self.scores(ids + written)
            half = [self.text(ids, written[: len(written) - n]).endswith("\ufffd") for n in (0, len(self.start) - 1)]
            here = may_call and not ((after_call or refused) and not written)
            if here and not half[0] and self.callable(ids + written) and self.triggered(ids + written, scores):
                return written, True
            here = may_call and not half[1] and not (after_call and len(written) - begun < len(self.start))
            here = here and bool(self.callable(ids + written[: len(written) - len(self.start) + 1]))
            here = here and not (refused and len(written) < len(self.start))
            if not here and (ids + written + [self.start[-1]])[-len(self.start) :] == self.start:
                scores[self.start[-1]] = -math.inf
            token = int(scores.argmax())
            while self.barred(ids, written, token, after_call, bare=len(written) == bare):
                scores[token] = -math.inf
                token = int(scores.argmax())
            if token == self.model.tokenizer.eos_token_id:
                break
            if found := re.search(LOOK_ALIKE, self.text(ids, [*written, token])):
                while len(self.text(ids, written)) > found.start():
                    written.pop()
                begun = bare = len(written)
                self.look_alikes += 1
                continue
            written.append(token)
            if may_call and written[-len(self.start) :] == self.start:
                return written[: -len(self.start)], True
        return written, False

    def barred(self, ids: list[int], written: list[int], token: int, after_call: bool, bare: bool) -> bool:
        before = self.text(ids, written)
        new = self.text(ids + written, [token])
        if re.search(LOOK_ALIKE, before + new):
            return False
        whole = self.text([], ids + written)
        ends = "->" in before[-1:] + new or any(unopened(whole + new, *kind) > unopened(whole, *kind) for kind in KINDS)
        return (bare and bool(re.search(r"[(\[{<]", new))) or (after_call and ends)

    def callable(self, ids: list[int]) -> set[str]:
        p = self.p_start(ids) if self.least else 0.0
        return {name for name in self.tools if name not in self.withheld and p >= self.least.get(name, 0.0)}

    def p_start(self, ids: list[int]) -> float:
        steps = (self.scores(ids + self.start[:at]).softmax(-1)[token] for at, token in enumerate(self.start))
        return float(math.prod(steps))

    def triggered(self, ids: list[int], scores: torch.Tensor) -> bool:
        probability = scores.softmax(-1)
        start = self.p_start(ids)
        better = [token for token, p in enumerate(probability.tolist()) if p > start and token != self.start[0]]
        return len(better) < self.k

    def call(self, ids: list[int], names: set[str]) -> list[int]:
        body: list[int] = []
        while len(body) < self.call_tokens and "->" not in self.text(self.start, body):
            by_score = self.scores(ids + body).sort(descending=True, stable=True).indices.tolist()
            token = next((token for token in by_score if self.keeps_form(body, token, names)), None)
            if token is None:
                return body
            body.append(token)
        return body

    def closed(self, ids: list[int], body: list[int]) -> str:
        """A call without an arrow ends where `)` is likeliest, of the places where it is among the k most likely."""
        whole = self.text(self.start, body)
        vocabulary = [self.text(self.start, [token]) for token in range(len(self.model.tokenizer))]
        ends = [] if "->" in whole else [token for token, text in enumerate(vocabulary) if text in (")", '")')]
        best = -math.inf
        call = whole
        for at in range(len(body)):
            written = self.text(self.start, body[:at])
            scores = self.scores(ids + body[:at])
            for token in ends:
                rank = int((scores > scores[token]).sum())
                p = float(scores.log_softmax(-1)[token])
                if "(" in written and not written.endswith("\ufffd") and rank < self.k and p > best:
                    best = p
                    call = f"{written}{vocabulary[token]} ->"
        return call

    def keeps_form(self, body: list[int], token: int, callable: set[str]) -> bool:
        """Name(input) -> and its beginnings: no second call, no "]", no line end in the input."""
        if token in self.model.tokenizer.all_special_ids or token >= len(self.model.tokenizer):
            return False
        try:
            codecs.getincrementaldecoder("utf-8")().decode(b"".join(map(self.bytes_of, [*body, token])))
        except UnicodeDecodeError:
            return False
        names = [f"{name}(" for name in callable]
        written, arrow, _ = self.text(self.start, [*body, token]).partition("->")
        if not arrow and "(" not in written:
            return any(name.startswith(written) for name in names)
        name, bracket, input = written.partition("(")
        closed = re.fullmatch(r"(.*)\)\s*", input, re.DOTALL)
        if f"{name}{bracket}" not in names or (arrow and not closed):
            return False
        input = closed[1] if arrow and closed else input
        return not re.search(r"[\]\n\r\v\f\x1c-\x1e\x85\u2028\u2029]|\[\s*[^\s\[\]()]+\(", input)

    def bytes_of(self, token: int) -> bytes:
        name = self.model.tokenizer.convert_ids_to_tokens(token)
        if re.fullmatch("<0x..>", name):
            return bytes([int(name[1:-1], 16)])
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return (
            bytes(letters[letter] for letter in name) if set(name) <= set(letters) else name.replace("▁", " ").encode()
        )

    def answer(self, written: str, context: str) -> DecodedCall:
        written, arrow, _ = written.partition("->")
        name, bracket, input = written.partition("(")
        if not arrow:
            return DecodedCall(name if bracket else "", input if bracket else written, None, "no_end")
        input = input.rstrip()[:-1]
        try:
            [found] = self.tools[name].run([ToolCall(input, context)])
        except ToolDown:
            found = ToolResult(None, "tool_down")
        return DecodedCall(name, input, found.result, found.reason)

    def text(self, before: list[int], ids: list[int]) -> str:
        decode = self.model.tokenizer.decode
        return str(decode(before + ids, skip_special_tokens=True))[len(decode(before, skip_special_tokens=True)) :]

    def scores(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model.model(torch.tensor([ids])).logits[0, -1].double()


def check(
    model: LanguageModel,
    prompts: Sequence[str],
    k: int,
    withheld: frozenset[str] = frozenset(),
    calls: int = 1,
    least: Mapping[str, float] | None = None,
) -> Any:
    contexts = [f"2023-01-{at + 10}" for at in range(len(prompts))]
    options = {
        "top_k": k,
        "withheld_tool_names": withheld,
        "max_call_positions": calls,
        "max_new_tokens": 20,
        "max_call_tokens": 16,
    }
    found = generate(model, prompts, TOOLS, contexts=contexts, min_start_probability_by_tool=least or {}, **options)
    reference = Reference(model, TOOLS, k, withheld, 20, 16, calls, least or {})
    assert found == [reference.run(prompt, date) for prompt, date in zip(prompts, contexts, strict=True)]
    return dict(zip(prompts, found, strict=True))


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)])
def scripted(
    request: pytest.FixtureRequest, tiny_model: Callable[..., LanguageModel], tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    """A model that knows SCRIPTS by heart: bad calls are its own, not made up by the test."""
    tiny = tiny_model("gptj", one_token_start=request.param, width=64)
    return teach(tiny, SCRIPTS, 120, tmp_path_factory.mktemp("scripted"))


def test_calls_are_well_formed_and_those_without_a_result_are_taken_back(scripted: LanguageModel) -> None:
    found = check(scripted, PROMPTS, k=1)
    calls = {prompt: generation.calls[0] for prompt, generation in found.items() if generation.calls}
    late = found["In other signs"]
    assert not late.calls or late.text.startswith(" so")
    assert set(PROMPTS) - set(calls) - {"In other signs"} == {"No call here"}
    assert calls["Bo had 3 and 4, so"] == DecodedCall("Calculator", "3 + 4", "7", None)
    assert calls["Di had 3 and some, so"] == DecodedCall("Calculator", "3 + x", None, "not_a_sum")
    assert calls["It is now"] == DecodedCall("Calendar", "", "Today is 2023-01-18.", None)
    assert calls["About Oslo"] == DecodedCall("WikiSearch", "Oslo", None, "tool_down")
    assert calls["No end, there were"].reason == "no_end"
    # "Maps", "see the note", "]" before the arrow and the end of the text: none of them can be written
    assert {call.tool for call in calls.values()} <= set(TOOLS)
    assert found["Bo had 3 and 4, so"].text == SCRIPTS["Bo had 3 and 4, so"]
    assert found["Bo had 3 and 4, so"].plain_text == " 7 in all."
    assert found["No call here"].text == SCRIPTS["No call here"]
    assert found["Closed again"].plain_text.startswith(" 2") and "]" not in found["Closed again"].plain_text
    for prompt, generation in found.items():
        kept = [call for call in generation.calls if call.result is not None]
        assert generation.text.count(" [") == generation.text.count("->") == len(kept)
        assert "->" not in generation.plain_text and "[" not in generation.plain_text
        if generation.calls and not kept and prompt != "In other signs":  # whose call comes late
            assert generation.text == ""  # the text ends where nothing answered


def test_where_a_call_found_nothing_other_tools_are_called_once_each(scripted: LanguageModel) -> None:
    prompts = ["About Oslo", "Di had 3 and some, so"]
    for calls, most in ((2, 2), (9, len(TOOLS))):
        for prompt, generation in check(scripted, prompts, k=1, calls=calls).items():
            tried = [call.tool for call in generation.calls[:most]]
            assert len(set(tried)) == len(tried) >= 2
            assert tried[0] == SCRIPTS[prompt][2:].partition("(")[0]
            assert generation.calls[0].result is None


def test_a_look_alike_of_a_call_is_not_written_and_other_text_stays(scripted: LanguageModel) -> None:
    for k in (0, 1):
        written = check(scripted, PROMPTS, k=k)["In other signs"]
        assert written.text.startswith(" so") and written.look_alike_count >= 1
        assert not re.search(LOOK_ALIKE, written.text)
    barred = generate(scripted, PROMPTS, TOOLS, top_k=0, max_new_tokens=20)
    free = generate(scripted, PROMPTS, {}, top_k=0, max_new_tokens=20)
    assert re.search(LOOK_ALIKE, dict(zip(PROMPTS, free, strict=True))["In other signs"].text)
    for one, other in zip(barred, free, strict=True):
        found = re.search(LOOK_ALIKE, other.text)
        assert bool(found) == bool(one.look_alike_count)
        assert one.text.startswith(other.text[: found.start()]) if found else one.text == other.text


def test_several_calls_where_they_are_allowed(scripted: LanguageModel) -> None:
    prompt = "Twice, first"
    assert check(scripted, [prompt], k=1)[prompt].text.count("[Calculator") == 1
    twice = check(scripted, [prompt], k=1, calls=3)[prompt]
    assert twice.text == SCRIPTS[prompt] and twice.plain_text == " 3 and then 5."
    assert [call.input for call in twice.calls] == ["1 + 2", "2 + 3"]
    for generation in check(scripted, PROMPTS[::2], k=100, calls=3).values():
        written = [format_decoded_call(call) for call in generation.calls]
        assert len(written) <= 3
        assert not any(first and second and first + second in generation.text for first, second in pairwise(written))


@pytest.mark.parametrize("withheld", [{"Calculator"}, {"WikiSearch", "Calendar"}, set(TOOLS)], ids=len)
def test_withheld_tools_are_never_called(scripted: LanguageModel, withheld: set[str]) -> None:
    found = check(scripted, PROMPTS, k=1, withheld=frozenset(withheld))
    called = {call.tool for generation in found.values() for call in generation.calls}
    assert not called & withheld
    assert called <= set(TOOLS)
    assert bool(called) == (len(withheld) < len(TOOLS))


def test_a_tool_is_called_only_where_the_start_of_a_call_is_likely_enough(scripted: LanguageModel) -> None:
    options = {"top_k": 100, "max_new_tokens": 20, "max_call_tokens": 16}
    some = PROMPTS[::2]
    before = generate(scripted, some, TOOLS, **options)
    recorded = sorted(one.start_probability or 0.0 for one in before)
    at = len(recorded) // 2
    least = (recorded[at - 1] + recorded[at]) / 2  # a batch may round the probability itself otherwise
    assert 0 < recorded[0] < least < recorded[-1] <= 1
    found = check(scripted, some, k=100, least=dict.fromkeys(TOOLS, least))
    likely = [one.start_probability is not None and one.start_probability >= least for one in before]
    assert [here for here in likely if here] and all(one.calls for one in before)
    for one, other, here in zip(found.values(), before, likely, strict=True):
        assert bool(one.calls) >= here and (not here or one.calls == other.calls)
    assert not all(one.calls for one in found.values())
    one_only = check(scripted, PROMPTS, k=1, least={"Calculator": 1.0})
    called = {prompt: [call.tool for call in one.calls] for prompt, one in one_only.items()}
    assert {tool for tools in called.values() for tool in tools} == {"Calendar", "WikiSearch"}
    assert called["It is now"] == ["Calendar"] and not called["Bo had 3 and 4, so"]


def test_a_larger_k_calls_more_often(scripted: LanguageModel) -> None:
    options = {"max_new_tokens": 20, "max_call_tokens": 16}
    shares = [sum(bool(g.calls) for g in generate(scripted, PROMPTS, TOOLS, top_k=k, **options)) for k in (0, 1, 100)]
    assert shares == sorted(shares)
    assert shares[0] == 0 and shares[1] >= 10 and shares[-1] == len(PROMPTS)


@pytest.mark.parametrize(
    ("kind", "one_token_start"),
    [
        ("llama", False),
        *(pytest.param(kind, True, marks=pytest.mark.long) for kind in ("gptj", "gpt2", "llama", "lfm2")),
        *(pytest.param(kind, False, marks=pytest.mark.long) for kind in ("gptj", "gpt2", "lfm2")),
    ],
)
def test_random_models_agree_with_the_reference(
    tiny_model: Callable[..., LanguageModel], kind: str, one_token_start: bool
) -> None:
    prompts = [
        "Ada had 17 apples and got",
        "The river of Oslo",
        "Today",
        "so there were " * 6,
        "Ünïcode 东西 [not a call",
    ]
    model = tiny_model(kind, one_token_start=one_token_start, bos=kind == "llama", seed=3)
    for k in (0, 1, 20):
        check(model, prompts, k)
    check(model, prompts, 150, calls=3)
    check(model, prompts, 150, withheld=frozenset({"WikiSearch"}))


def test_a_name_is_written_to_its_end_where_decoding_drops_a_leading_space(
    tiny_model: Callable[..., LanguageModel], llama_tokenizer: Callable[[str], Any]
) -> None:
    tokenizer = llama_tokenizer("first")
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["▁Cal"])) == "Cal"
    for seed in range(3):
        model = tiny_model("llama", seed=seed, tokenizer=tokenizer)
        options = {"top_k": len(tokenizer), "withheld_tool_names": frozenset({"WikiSearch"}), "max_new_tokens": 20}
        for generation in generate(model, ["I have", "I have two and"], TOOLS, max_call_tokens=16, **options):
            # a random model also writes half characters
            written = generation.text.partition(" [")[2].partition("\ufffd")[0]
            assert any(written.startswith(name) or name.startswith(written) for name in ("Calculator(", "Calendar("))


@pytest.mark.parametrize("kind", ["first", "prepended"])
def test_a_name_whose_letters_are_several_tokens_is_written_to_its_end(
    tiny_model: Callable[..., LanguageModel], llama_tokenizer: Callable[[str], Any], kind: str
) -> None:
    vocabulary = Vocabulary(tiny_model("llama", tokenizer=llama_tokenizer(kind)))
    matcher = vocabulary.build_call_form(["Übersetzer"], {}, 64).grammar_matcher
    body = list[int]()
    while "(" not in vocabulary.decode_text(body, vocabulary.start_tokens):
        token = int(np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))[0])
        assert matcher.consume_token(token)
        body.append(token)
    assert vocabulary.decode_text(body, vocabulary.start_tokens) == "Übersetzer("


def test_no_call_begins_inside_a_character(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        for weights in model.model.parameters():
            weights *= 15  # another token every time
    found = generate(model, [f"x{at}" for at in range(60)], TOOLS, top_k=60, max_new_tokens=12, max_call_tokens=4)
    assert any(g.calls for g in found) and any("\ufffd" in g.text for g in found)
    assert not any("\ufffd [" in g.text for g in found)


def test_a_call_begins_only_where_all_of_its_start_fits(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gpt2", one_token_start=False, positions=16)
    assert len(model.encoding.call_start_ids) == 2
    found = generate(model, ["7" * n for n in (14, 15)], TOOLS, top_k=400, max_new_tokens=8)
    assert [len(g.calls) for g in found] == [1, 0]


def test_a_prompt_that_fills_the_context_is_refused_by_name(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gpt2", positions=16)
    long, short, empty = generate(model, ["apples " * 40, "Ada had", ""], TOOLS, top_k=0, max_new_tokens=40)
    assert (long.reason, long.text, long.token_count) == ("does_not_fit", "", 0)
    assert (empty.reason, empty.text) == ("empty_prompt", "")
    assert short.reason is None
    assert len(model.tokenizer("Ada had").input_ids) + short.token_count == 16
    assert generate(model, [], TOOLS, max_new_tokens=4) == []


def test_a_row_that_fills_the_context_is_not_padded_beyond_it(tiny_model: Callable[..., LanguageModel]) -> None:
    """GPT-Neo's own mask ends with the context, and a short row keeps the padding of a long one that has left."""
    model = tiny_model("gpt_neo", positions=64)
    long = next(text for n in range(99) if len(model.tokenizer(text := "7" * n).input_ids) == 61)
    both = generate(model, [long, "Ada had"], TOOLS, top_k=0, max_new_tokens=8)
    assert both == [generate(model, [text], TOOLS, top_k=0, max_new_tokens=8)[0] for text in (long, "Ada had")]
    assert [one.token_count for one in both] == [3, 8]


@pytest.mark.parametrize("kind", ["llama4_text", "mamba", "roberta", "recurrent_gemma"])
def test_every_kind_of_model_decodes_as_it_does_alone(tiny_model: Callable[..., LanguageModel], kind: str) -> None:
    check(tiny_model(kind), PROMPTS[:4], k=20)
