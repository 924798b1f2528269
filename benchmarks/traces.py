"""How well `judge` tells made conversations with known faults apart: python -m benchmarks.traces --model MODEL.

Every fault is judged in a project of its own, with the swapped results of its own conversations. A share is that of the
calls which are said to help; an AUC is the chance that a right call has more than one with the fault, ties count half;
intervals are 95 % bootstraps over conversations. `--data FOLDER` judges the recorded conversations of a folder instead:
the AUC is the chance that a recorded result has more than a result of the same tool from another conversation.
"""

import argparse
import random
import resource
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.made_traces import FAULTS, records
from toolformer_dag.lake.warehouse import query
from toolformer_dag.markdown import format_markdown_table
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judgement import Judgement, get_traces_database_path, judge_traces

Values = dict[int, float]
CALLS = "SELECT split_part(conversation, ':', 2)::INT AS n, verdict = 'helps' AS helps, {} AS value FROM trace_calls"
LAST = "QUALIFY row_number() OVER (PARTITION BY conversation ORDER BY turn DESC) = 1"
RECORDED = "SELECT conversation, {} FROM trace_calls WHERE means = 'other_results' AND gain IS NOT NULL"
CHANCE = "SELECT conversation, {} FROM trace_chance WHERE means = 'other_results'"
VALUES = ("gain", "overlap")
COUNTS = "SELECT means, verdict, count(*) AS calls FROM trace_calls GROUP BY ALL ORDER BY ALL"
SWAPPED = "SELECT split_part(conversation, ':', 2)::INT AS n, gain, overlap FROM trace_chance"


def auc(right: Sequence[float], other: Sequence[float]) -> float:
    """Return the chance that a right one is above another one; ties count half."""
    return sum((a > b) + 0.5 * (a == b) for a in right for b in other) / (len(right) * len(other))


Group = tuple[list[float], list[float]]  # of a conversation: the values of its recorded results, and of others


def interval(groups: Sequence[Group], statistic: Callable[[list[float], list[float]], float]) -> str:
    """Return a statistic of all groups with its 95 % bootstrap interval over them, as "0.81 (0.77-0.85)"."""
    chance = random.Random(1)
    drawn = []
    for _ in range(400):
        resampled = chance.choices(groups, k=len(groups))
        drawn.append(_over_all(resampled, statistic))
    drawn.sort()
    low = drawn[10]
    high = drawn[390]
    return f"{_over_all(groups, statistic):.2f} ({low:.2f}-{high:.2f})"


def _over_all(groups: Sequence[Group], statistic: Callable[[list[float], list[float]], float]) -> float:
    """Return a statistic of the values of all groups taken together."""
    recorded_values = [value for recorded, _ in groups for value in recorded]
    other_values = [value for _, others in groups for value in others]
    return statistic(recorded_values, other_values)


def judged(fault: str, count: int, pairs: Sequence[str], folder: Path) -> Judgement:
    """Judge so many conversations with a fault in a project of their own."""
    (folder / "toolformer.toml").write_text("[tools.calculator]\n")
    lines = [orjson.dumps(record) + b"\n" for record in records(count, fault)]
    (folder / "made.jsonl").write_bytes(b"".join(lines))
    settings = load_settings(folder / "toolformer.toml", overrides=pairs)
    return judge_traces(settings, [str(folder / "made.jsonl")], get_traces_database_path(settings))


@dataclass(frozen=True)
class JudgedFault:
    """The last calls of the conversations with one fault; every field by the conversation's number.

    - helps: 1.0 where the verdict is "helps", else 0.0
    - values: by name ("gain", "overlap"), the value of the recorded result
    - values_of_others: likewise, the values of other results of the tool in its place
    """

    helps: Values
    values: Mapping[str, Values]
    values_of_others: Mapping[str, Mapping[int, list[float]]]


def judged_fault(judgement: Judgement) -> JudgedFault:
    """Read the last call of each conversation from the tables of a judgement."""
    helps: Values = {}
    values: dict[str, Values] = {name: {} for name in VALUES}
    for name in VALUES:
        for conversation, is_helping, value in query(judgement.database, f"{CALLS.format(name)} {LAST}").rows():
            helps[conversation] = float(is_helping)
            if value is not None:
                values[name][conversation] = value
    values_of_others: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in VALUES}
    for conversation, *values_of_result in query(judgement.database, SWAPPED).rows():
        for name, value in zip(VALUES, values_of_result, strict=True):
            values_of_others[name][conversation].append(value)
    return JudgedFault(helps, values, values_of_others)


def cells(fault: JudgedFault, right: JudgedFault) -> list[str]:
    """Return the number of calls, the share that helps, and the AUC of each value.

    The AUC is that of right calls against calls with the fault; of right calls, against other results of their tool.
    """
    share = interval([([value], []) for value in fault.helps.values()], lambda values, _: sum(values) / len(values))
    line = [str(len(fault.helps)), share]
    for name in VALUES:
        if fault is right:
            others = fault.values_of_others[name]
        else:
            others = {conversation: [value] for conversation, value in fault.values[name].items()}
        groups = []
        for conversation, value in right.values[name].items():
            other_values = others.get(conversation, [])
            if conversation in fault.values[name] and None not in other_values:
                groups.append(([value], other_values))
        line.append(interval(groups, auc))
    return line


def told_apart(judgement: Judgement, value: str) -> str:
    """Return the AUC of a value of recorded results against other results of their tools, with its interval."""
    groups: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for conversation, recorded in query(judgement.database, RECORDED.format(value)).rows():
        groups[conversation][0].append(recorded)
    for conversation, swapped in query(judgement.database, CHANCE.format(value)).rows():
        groups[conversation][1].append(swapped)
    return interval(list(groups.values()), auc)


def judge_folder(folder: Path, pairs: Sequence[str]) -> None:
    """Judge recorded conversations, and print how well their results are told from others of the same tool."""
    with tempfile.TemporaryDirectory() as project:
        settings_file = Path(project) / "toolformer.toml"
        settings_file.write_text("[tools.calculator]\n")
        settings = load_settings(settings_file, overrides=pairs)
        judgement = judge_traces(settings, [str(folder)], get_traces_database_path(settings))
        print(judgement.summary_line)
        for value in ("gain", "relative_gain", "overlap"):
            print(f"AUC of {value}: {told_apart(judgement, value)}")
        print(query(judgement.database, COUNTS))
    print(f"{judgement.model_token_count:,} tokens")


def main() -> None:
    """Judge every fault and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, help="folder of recorded conversations in place of made ones")
    chosen = parser.parse_args()
    if chosen.data is not None:
        judge_folder(chosen.data, [f"model.name={chosen.model}", *chosen.set])
        return
    tokens = 0
    judged_faults: dict[str, JudgedFault] = {}
    lines = []
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            judgement = judged(fault, chosen.count, [f"model.name={chosen.model}", *chosen.set], Path(folder))
            judged_faults[fault] = judged_fault(judgement)
        tokens += judgement.model_token_count
        line = [fault, *cells(judged_faults[fault], right=judged_faults["right"])]
        print(*line, sep=" | ", flush=True)
        lines.append(line)
    print(format_markdown_table(("last call", "n", "share that helps", "AUC of gain", "AUC of overlap"), lines))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{tokens:,} tokens, {usage.ru_utime:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
