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
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from benchmarks.made_traces import FAULTS, records
from toolformer_dag.lake.warehouse import query
from toolformer_dag.markdown import table
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judgement import Judgement, judge_traces, traces_database

Values = dict[int, float]
CALLS = "SELECT split_part(conversation, ':', 2)::INT AS n, verdict = 'helps' AS helps, {} AS value FROM trace_calls"
LAST = "QUALIFY row_number() OVER (PARTITION BY conversation ORDER BY turn DESC) = 1"
RECORDED = "SELECT conversation, {} FROM trace_calls WHERE means = 'other_results' AND gain IS NOT NULL"
CHANCE = "SELECT conversation, {} FROM trace_chance WHERE means = 'other_results'"
COUNTS = "SELECT means, verdict, count(*) AS calls FROM trace_calls GROUP BY ALL ORDER BY ALL"
SWAPPED = "SELECT split_part(conversation, ':', 2)::INT AS n, gain, overlap FROM trace_chance"


def auc(right: Sequence[float], other: Sequence[float]) -> float:
    """Return the chance that a right one is above another one; ties count half."""
    return sum((a > b) + 0.5 * (a == b) for a in right for b in other) / (len(right) * len(other))


def interval(groups: Sequence[tuple[list[float], list[float]]], statistic: Callable[..., float]) -> str:
    """Return a statistic of all groups with its 95 % bootstrap interval over them."""
    chance, drawn = random.Random(1), []
    for number in range(401):
        some = groups if not number else chance.choices(groups, k=len(groups))
        drawn.append(statistic([x for own, _ in some for x in own], [x for _, other in some for x in other]))
    low, high = (sorted(drawn[1:])[at] for at in (10, 390))
    return f"{drawn[0]:.2f} ({low:.2f}-{high:.2f})"


def judged(fault: str, count: int, pairs: Sequence[str], folder: Path) -> Judgement:
    """Judge so many conversations with a fault in a project of their own."""
    (folder / "toolformer.toml").write_text("[tools.calculator]\n")
    lines = [orjson.dumps(one) + b"\n" for one in records(count, fault)]
    (folder / "made.jsonl").write_bytes(b"".join(lines))
    settings = load_settings(folder / "toolformer.toml", overrides=pairs)
    return judge_traces(settings, [str(folder / "made.jsonl")], traces_database(settings))


def rows(judgement: Judgement, value: str) -> tuple[Values, Values]:
    """Return a value of the last call of each conversation by its number, and whether it helps."""
    found = query(judgement.database, f"{CALLS.format(value)} {LAST}").rows()
    return {n: value for n, _, value in found if value is not None}, {n: float(helps) for n, helps, _ in found}


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
        judgement = judge_traces(settings, [str(folder)], traces_database(settings))
        print(judgement.summary)
        for value in ("gain", "relative_gain", "overlap"):
            print(f"AUC of {value}: {told_apart(judgement, value)}")
        print(query(judgement.database, COUNTS))
    print(f"{judgement.tokens:,} tokens")


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
    cells, tokens = [], 0
    right: dict[str, Values] = {}
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            judgement = judged(fault, chosen.count, [f"model.name={chosen.model}", *chosen.set], Path(folder))
            tokens += judgement.tokens
            found = {name: rows(judgement, name)[0] for name in ("gain", "overlap")}
            helps = rows(judgement, "gain")[1]
            swapped = query(judgement.database, SWAPPED).rows()
        right = right or found
        share = interval([([value], []) for value in helps.values()], lambda own, _: sum(own) / len(own))
        row = [fault, str(len(helps)), share]
        for at, name in enumerate(("gain", "overlap")):
            others = {n: [value] for n, value in found[name].items()}
            if fault == "right":
                others = {n: [values[at] for m, *values in swapped if m == n] for n in others}
            groups = [([right[name][n]], others[n]) for n in right[name] if n in others]
            row.append(interval([one for one in groups if None not in (*one[0], *one[1])], auc))
        cells.append(row)
        print(*row, sep=" | ", flush=True)
    print(table(("last call", "n", "share that helps", "AUC of gain", "AUC of overlap"), cells))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{tokens:,} tokens, {usage.ru_utime:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
