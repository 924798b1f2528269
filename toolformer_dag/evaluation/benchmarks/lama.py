"""LAMA: SQuAD, Google-RE and T-REx (section 4.2.1).

As in LAMA itself, T-REx and Google-RE statements are its templates filled in, SQuAD's are masked sentences. Statements
whose mask is not the last word are left out, as in the paper.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import completion
from toolformer_dag.evaluation.benchmarks.source import Made, files, json_lines, own_shape, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_five_words

WITHHELD = frozenset({"WikiSearch"})
GOOGLE_RE = {  # LAMA's scripts/run_experiments.py
    "/people/person/place_of_birth": "[X] was born in [Y] .",
    "/people/person/date_of_birth": "[X] (born [Y]).",
    "/people/deceased_person/place_of_death": "[X] died in [Y] .",
}
MASK_LAST = re.compile(r"(.+?)\s*\[(?:MASK|Y)\][\s.!?)]*", re.DOTALL)


def lama(folder: Path) -> list[Benchmark]:
    """The three subsets in LAMA's own folders `Squad`, `Google_RE`, `TREx` and file `relations.jsonl`."""
    templates = _templates(folder / "relations.jsonl")
    subsets = (
        ("LAMA SQuAD", "Squad", _squad),
        ("LAMA Google-RE", "Google_RE", partial(_templated, templates=GOOGLE_RE, key="pred")),
        ("LAMA T-REx", "TREx", partial(_templated, templates=templates, key="predicate_id")),
    )
    found = []
    for name, subset, make in subsets:
        records = {file: json_lines(file) for file in files(folder / subset, "*.jsonl")}
        questions, left_out = sort_out(records, make)
        found.append(Benchmark(name, questions, in_first_five_words, WITHHELD, left_out))
    return found


def _templates(file: Path) -> dict[str, str]:
    found = {}
    for number, one in enumerate(json_lines(file), 1):
        with own_shape(f"{file}, record {number}"):
            found[one["relation"]] = one["template"].strip()
    return found


def _squad(record: Any) -> Made:
    sentences = record["masked_sentences"]
    return _question(sentences[0], record["obj_label"]) if len(sentences) == 1 else "several_sentences"


def _templated(record: Any, templates: Mapping[str, str], key: str) -> Made:
    template = templates.get(record[key])
    if template is None:
        return "unknown_relation"
    return _question(template.replace("[X]", record["sub_label"]), record["obj_label"])


def _question(masked: str, answer: str) -> Made:
    match = MASK_LAST.fullmatch(masked)
    if match is None:
        return "mask_not_last"
    return Question(completion(match[1]), (answer,), "question_answering")
