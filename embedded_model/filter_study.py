"""Compare filters on the synthetic world, where right calls are known: what each keeps, and what it teaches.

The pages are annotated once, and every filter decides over the same stored losses. Finetuning, questions and perplexity
repeat per filter and seed; each finished result is a line of `results.jsonl`, so a study can be stopped and resumed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree

import polars as pl

from embedded_model.effect_study import plain_texts, unfiltered_texts
from toolformer_dag.evaluation.asking import benchmark_outcomes
from toolformer_dag.evaluation.catalogue import synthetic_benchmark
from toolformer_dag.evaluation.language_modeling import perplexity
from toolformer_dag.evaluation.scores import Condition
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.warehouse import build
from toolformer_dag.model.loading import load_identified
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stages import table_outputs, warehouse_tables
from toolformer_dag.pipeline.update import update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import Workers, in_process
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.phenomena import TOOLS
from toolformer_dag.synthetic.web import explained_records
from toolformer_dag.synthetic.wordings import WordingSet
from toolformer_dag.training.checkpoint_outputs import training_texts
from toolformer_dag.training.finetune import finetune

WORDINGS: tuple[WordingSet, ...] = ("seen", "unseen")
LEVEL = 0.05
RESULTS = "results.jsonl"
LINE = """profile = "embedded"
[corpus]
{corpus}
[evaluation]
questions = {questions}
swapped_texts = 1000000
[control]
swaps = {swaps}
"""
SPACE = re.compile(" ")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FilterRule:
    """A filter. `by_chance`: the threshold's false discovery rate; None takes the profile's tau_f.

    `filtered`: whether losses decide at all, or a random call of each text is taken, as many texts per tool as the
    paper's filter keeps.
    """

    name: str
    look_ahead: bool
    by_chance: float | None = None
    filtered: bool = True

    def overrides(self) -> list[str]:
        """Return the settings of all lanes."""
        ahead = [f"tools.{tool}.look_ahead={json.dumps(self.look_ahead)}" for tool in TOOLS]
        chosen = [f"tools.{tool}.tau_f={{ by_chance = {self.by_chance} }}" for tool in TOOLS]
        return [*ahead, *(chosen if self.by_chance is not None else ())]


RULES = (
    FilterRule("the paper's", look_ahead=False),
    FilterRule("look-ahead", look_ahead=True),
    FilterRule("by chance", look_ahead=True, by_chance=LEVEL),
    FilterRule("no filter", look_ahead=False, filtered=False),
)


@dataclass(frozen=True, slots=True)
class FilterStudy:
    """A study in `folder`: `documents` synthetic pages, `questions` per tool and wordings, `swaps` per call."""

    folder: Path
    documents: int = 800
    questions: int = 60
    swaps: int = 4
    real_text: tuple[Path, ...] = ()
    real_texts: int = 300

    def described(self) -> dict[str, object]:
        """Return the fields of a FilterResult by which it is this study's."""
        sizes = {"documents": self.documents, "swaps": self.swaps, "questions": self.questions}
        return {**sizes, "real_text": [str(path) for path in self.real_text]}

    def synthetic(self, rule: FilterRule, seed: int = 0) -> Plan:
        """Return the plan of a rule over the synthetic pages; the seed is that of finetuning and questions."""
        web = f"small_web = {{ shards = 2, documents = {self.documents} }}"
        return self._plan("synthetic", web, [*rule.overrides(), *_seeds(seed)])

    def real(self, rule: FilterRule) -> Plan:
        """Return the plan of a rule over the real pages: `real_texts` texts per file and tool."""
        shards = json.dumps([str(path) for path in self.real_text])
        return self._plan("real", f"shards = {shards}\ntexts_per_shard = {self.real_texts}", rule.overrides())

    def _plan(self, name: str, corpus: str, overrides: Sequence[str]) -> Plan:
        file = self.folder / name / "toolformer.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(LINE.format(corpus=corpus, questions=self.questions, swaps=self.swaps))
        return Plan.of(load_settings(file, environment={}, overrides=overrides))


def _seeds(seed: int) -> list[str]:
    return [f"training.seed={seed}", f"evaluation.seed={seed + 7}"]


def annotate(plan: Plan, say: Say) -> Path:
    """Bring all tables up to C* up to date, in this process, and return the warehouse over them.

    Another rule over the same pages reuses every loss.
    """
    outputs = table_outputs(plan)
    worker = Worker(plan)
    workers = Workers(worker, {output.name: output for output in outputs}, in_process)
    for output in outputs:
        report = update(worker, workers, output, lambda done, total: None)
        if not report.unchanged:
            say(f"{output.name}: {sum(report.rows.values())} rows, {sum(report.work.tokens.values()):,} tokens")
    database = plan.settings.paths.warehouse
    build(plan.lake, warehouse_tables(outputs), plan.lane_names, database)
    return database


def judged_calls(plan: Plan) -> pl.DataFrame:
    """Return the scored calls of the synthetic pages with `right`, `kept`, `text`, `place` (its character in the text).

    A call is right where it stands before an answer of its text, as the replayed generator knows, and its result is
    this answer. A date or a snippet has to hold the answer, or the rest of it ("August 21,| 2022").
    """
    web = plan.settings.corpus.small_web
    answers = [
        (record["digest"], record["raw_content"].index(one.text) + len(one.before) + begun, one.answer[begun:].strip())
        for record, found in explained_records(web.seed, "corpus", web.documents)
        for one in found
        for begun in (0, *(space.start() + 1 for space in SPACE.finditer(one.answer)))
    ]
    gold = pl.DataFrame(answers, ["digest", "char_offset", "answer"], orient="row").unique(["digest", "char_offset"])
    return pl.concat([_judged(plan, lane.key, gold) for lane in plan.lanes])


def _judged(plan: Plan, tool: str, gold: pl.DataFrame) -> pl.DataFrame:
    texts = plan.lake.table(f"{tool}/heuristic_subset").scan().collect()
    texts = texts.select("shard", "digest", "segment", "offset", "text")
    kept = plan.lake.table(f"{tool}/filtered_calls").scan().collect().select("digest", "segment", "position", "sample")
    calls = plan.lake.table(f"{tool}/loss_deltas").scan().collect()
    calls = calls.join(texts, on=["shard", "digest", "segment"]).join(gold, on=["digest", "char_offset"], how="left")
    calls = calls.join(kept.with_columns(kept=True), on=["digest", "segment", "position", "sample"], how="left")
    holds = pl.col("result").str.contains(pl.col("answer"), literal=True)
    same = holds if tool in ("calendar", "wiki_search") else pl.col("result") == pl.col("answer")
    return calls.with_columns(
        right=same.fill_null(False),
        kept=pl.col("kept").fill_null(False),
        place=pl.col("char_offset") - pl.col("offset"),
    )


@dataclass(frozen=True, slots=True)
class FilterResult:
    """What a model that was finetuned on a rule's corpus does. `answers`: (benchmark, questions, right, called).

    `documents`, `swaps`, `questions` and `real_text` are the study's (`FilterStudy.described`). `corpus`: fingerprint
    of the training texts; rules that keep the same calls share a result.
    """

    rule: str
    seed: int
    documents: int
    swaps: int
    questions: int
    real_text: list[str]
    corpus: str
    texts: int
    steps: int
    answers: tuple[tuple[str, int, int, int], ...]
    perplexity: Mapping[str, float]
    seconds: float


def results(study: FilterStudy) -> list[FilterResult]:
    """Return the study's results so far; lines of other studies and one that was cut short are left out."""
    file = study.folder / RESULTS
    return list(_read(file.read_text("utf-8"), study.described())) if file.exists() else []


def _read(lines: str, described: Mapping[str, object]) -> Iterator[FilterResult]:
    for line in lines.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if {name: values.get(name) for name in described} == described:
            yield FilterResult(**{**values, "answers": tuple(map(tuple, values["answers"]))})


def append_result(folder: Path, result: FilterResult) -> None:
    """Add a line to the results; behind a line that was cut short it begins a new one."""
    file = folder / RESULTS
    cut = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if cut else "") + json.dumps(asdict(result)) + "\n")


def run(study: FilterStudy, seeds: Sequence[int], say: Say) -> None:
    """Annotate, then finetune and measure each rule with each seed, seed by seed, and append a line per result."""
    for seed in seeds:
        for rule in RULES:
            if (rule.name, seed) in {(one.rule, one.seed) for one in results(study)}:
                continue
            result = _result(study, rule, seed, say)
            append_result(study.folder, result)
            say(f"{rule.name}, seed {seed}: {result.texts} texts, {result.seconds:.0f} s")


def _result(study: FilterStudy, rule: FilterRule, seed: int, say: Say) -> FilterResult:
    plan, began = study.synthetic(rule, seed), time.monotonic()
    annotate(plan, say)
    texts, choosing = training_texts(plan, "finetuned_checkpoint")
    if not rule.filtered:
        texts = unfiltered_texts(plan.lake, plan.lanes, seed)
    corpus = fingerprint({"texts": texts, "choosing": choosing})
    for one in results(study):
        if (one.corpus, one.seed) == (corpus, seed):
            return replace(one, rule=rule.name, seconds=0.0)
    folder = plan.settings.root / "checkpoint"
    steps = finetune(plan.settings.model, texts, choosing, plan.settings.training, folder).steps
    answers, measured = _measured(plan, folder, study.real_text)
    rmtree(folder)
    seconds = round(time.monotonic() - began, 1)
    return FilterResult(
        rule=rule.name,
        seed=seed,
        documents=study.documents,
        swaps=study.swaps,
        questions=study.questions,
        real_text=[str(path) for path in study.real_text],
        corpus=corpus,
        texts=len(texts),
        steps=steps,
        answers=answers,
        perplexity=measured,
        seconds=seconds,
    )


def _measured(
    plan: Plan, folder: Path, real_text: Sequence[Path]
) -> tuple[tuple[tuple[str, int, int, int], ...], dict[str, float]]:
    """Answers to the questions of all tools, and the perplexity of held-out texts."""
    settings = plan.settings
    model = load_identified(settings.model, str(folder))
    condition, answers = Condition("Toolformer", settings.decoding.k), []
    for wordings in WORDINGS:
        for tool in TOOLS:
            asked = synthetic_benchmark(tool, settings.evaluation.questions, settings.evaluation.seed, wordings)
            found = benchmark_outcomes(settings, plan.lanes, model, condition, asked).outcomes
            called = sum(one.called is not None for one in found)
            answers.append((asked.name, len(found), sum(one.correct for one in found), called))
    texts = plain_texts(settings.corpus.small_web.seed, real_text)
    return tuple(answers), {kind: perplexity(model, some).perplexity for kind, some in texts.items() if some}
