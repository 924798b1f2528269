"""lm-evaluation-harness with a model that calls its tools gives our own figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra `lm-eval`)")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance

from tests.pipeline.conftest import Line
from tests.worlds import make_model
from toolformer_dag.evaluation.asking import ask_benchmark
from toolformer_dag.evaluation.benchmark import find_predicted_number
from toolformer_dag.evaluation.catalogue import read_benchmark
from toolformer_dag.evaluation.harness_adapter import HarnessModel, harness_task
from toolformer_dag.evaluation.outcomes import Condition
from toolformer_dag.files import UserError
from toolformer_dag.model.loading import load_model, load_model_with_identity
from toolformer_dag.settings.sections import Settings
from toolformer_dag.texts.calls import remove_calls
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.tool import ToolCall, ToolResult

SUMS = [(2, 3), (4, 4), (1, 7), (5, 2), (6, 1), (3, 3)]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """A folder with settings, a calculator and a small model in which nothing ran."""
    line = Line.new(tmp_path_factory.mktemp("harness"), make_model(tmp_path_factory.mktemp("model") / "a"), ["one"])
    line.set(decoding__k=10, decoding__max_new_tokens=12)
    return line


def settings(line: Line) -> Settings:
    return line.plan().settings


def model_of(line: Line, **options: Any) -> HarnessModel:
    return HarnessModel(config=str(line.folder / "toolformer.toml"), max_new_tokens=12, **options)


def write_svamp(file: Path, answers: list[float]) -> None:
    records = [
        {"Body": f"{a} and {b} make {a + b} .", "Question": f"{b} and {a} make", "Answer": answer, "Type": "Sum"}
        for (a, b), answer in zip(SUMS, answers, strict=True)
    ]
    file.write_text("\n".join(map(json.dumps, records)))


def request(kind: str, *arguments: Any, doc: dict[str, Any] | None = None) -> Instance:
    return Instance(kind, doc or {}, arguments, 0)


def test_the_harness_gives_our_figure_of_svamp(line: Line, tmp_path: Path) -> None:
    known = settings(line)
    file = tmp_path / "svamp.jsonl"
    write_svamp(file, [0.0] * len(SUMS))

    def ours() -> Any:
        [benchmark] = read_benchmark("svamp", file)
        asked = ask_benchmark(
            known, line.plan().lanes, load_model_with_identity(known.model), Condition("Toolformer", 10), benchmark
        )
        return benchmark, asked.outcomes

    numbers = [find_predicted_number(remove_calls(one.written, ["Calculator"])) for one in ours()[1]]
    assert any(number is not None for number in numbers)
    right = [float(number) if number is not None and at % 2 == 0 else -77.0 for at, number in enumerate(numbers)]
    write_svamp(file, right)
    benchmark, outcomes = ours()
    accuracy = sum(one.correct for one in outcomes) / len(outcomes)
    assert 0 < accuracy < 1 and any(one.calls for one in outcomes)
    found = simple_evaluate(
        model_of(line), tasks=[harness_task(benchmark, "svamp_with_tools", 12)], bootstrap_iters=0, log_samples=True
    )
    assert found["results"]["svamp_with_tools"]["acc,none"] == pytest.approx(accuracy)
    samples = sorted(found["samples"]["svamp_with_tools"], key=lambda sample: sample["doc_id"])
    assert [bool(sample["acc"]) for sample in samples] == [one.correct for one in outcomes]
    plain = [remove_calls(one.written, ["Calculator"]) for one in outcomes]
    assert [sample["resps"][0][0] for sample in samples] == plain


def test_what_is_written_ends_at_the_task_s_limit_and_stop_string(line: Line) -> None:
    prompt = "2 and 3 make 5 . 4 and 1 make"
    whole, short, stopped = model_of(line, k=0).generate_until(
        [
            request("generate_until", prompt, {"until": [], "max_gen_toks": 12}),
            request("generate_until", prompt, {"until": [], "max_gen_toks": 2}),
            request("generate_until", prompt, {"until": ["and", "."], "max_gen_toks": 12}),
        ]
    )
    assert whole.startswith(short) and len(short) < len(whole)
    assert whole.startswith(stopped) and "." not in stopped and "and" not in stopped
    with pytest.raises(UserError, match="greedy"):
        model_of(line).generate_until([request("generate_until", prompt, {"do_sample": True})])


def test_a_withheld_tool_is_not_called(line: Line) -> None:
    asked = [request("generate_until", "2 and 3 make", {"until": []})]
    assert model_of(line, withheld="Calculator").generate_until(asked) == model_of(line, k=0).generate_until(asked)


class LaterCalculator(Calculator):
    """Answers a finetuned model; notes what it was asked."""

    asked: ClassVar[list[str]] = []

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.asked.extend(call.input for call in calls)
        return super().run(calls)


def test_the_tools_of_inference_answer_as_many_calls_as_decoding_allows(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Calculator, "at_inference", lambda it: LaterCalculator(it.key, it.options, it.prompt))
    several = line.folder / "several.toml"
    several.write_text((line.folder / "toolformer.toml").read_text() + "[decoding]\ncalls = 3\n")
    found = []
    for file in (line.folder / "toolformer.toml", several):
        LaterCalculator.asked.clear()
        model = HarnessModel(config=str(file), max_new_tokens=40, k=60)
        model.generate_until([request("generate_until", f"{a} and {b} make", {"until": []}) for a, b in SUMS])
        found.append(len(LaterCalculator.asked))
    assert 0 < found[0] < found[1]


def test_log_probabilities_are_those_of_the_model(line: Line) -> None:
    loaded = load_model(settings(line).model)
    texts = [("2 and 3", " make 5 ."), ("", "4 and"), ("2 and 3 make", "")]
    found = model_of(line).loglikelihood([request("loglikelihood", *pair) for pair in texts])
    for (context, continuation), (nats, greedy) in zip(texts, found, strict=True):
        before, whole = (
            loaded.encoding.bos_ids + one.token_ids
            for one in loaded.encoding.encode_texts([context, context + continuation])
        )
        logits = loaded.model(torch.tensor([whole])).logits[0].log_softmax(-1).detach()
        places = range(max(len(before), 1), len(whole))
        assert nats == pytest.approx(sum(float(logits[at - 1, whole[at]]) for at in places), abs=1e-4)
        assert greedy == all(int(logits[at - 1].argmax()) == whole[at] for at in places)
    [rolling] = model_of(line).loglikelihood_rolling([request("loglikelihood_rolling", "4 and")])
    assert rolling == pytest.approx(found[1][0], abs=1e-4)
