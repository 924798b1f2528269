"""The readers, on small files in the sources' own form and on the real ones where they are at hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from toolformer_dag.evaluation.benchmark import (
    is_in_first_five_words,
    is_in_first_ten_words,
    is_in_first_twenty_words,
    is_number_right,
)
from toolformer_dag.evaluation.benchmark_files import BenchmarkError, read_wikitext_articles
from toolformer_dag.evaluation.catalogue import (
    build_questions_identity,
    collect_chosen_benchmarks,
    read_benchmark,
    read_benchmark_identity,
)
from toolformer_dag.settings.evaluation_settings import EvaluationSettings

LAMA = "Please complete the following text so that it is factually correct: "
ASK = "Answer the following question: "
MLQA = (
    "Your task is to answer a question based on the following paragraph: {} "
    "Now answer the following question in English: {}"
)
FOLDERS = {"lama", "mawps", "mlqa"}
WITHHELD = {"lama": {"WikiSearch"}, "webquestions": {"QA"}, "nq": {"QA"}, "triviaqa": {"QA"}}
RULES = {
    **dict.fromkeys(("lama", "templama"), is_in_first_five_words),
    **dict.fromkeys(("webquestions", "nq", "triviaqa"), is_in_first_twenty_words),
    **dict.fromkeys(("asdiv", "svamp", "mawps"), is_number_right),
    "mlqa": is_in_first_ten_words,
    **dict.fromkeys(("irrelevance", "when2call"), is_in_first_twenty_words),
}


def write(folder: Path, files: dict[str, str]) -> None:
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content, encoding="utf-8")


def of_mlqa(language: str, version: str = "1.0", **asked: str) -> dict[str, str]:
    """Return a file of MLQA with a paragraph and the questions by their ids."""
    answers = [{"text": "Bo"}, {"text": "Bo"}]
    qas = [{"id": key, "question": question, "answers": answers} for key, question in asked.items()]
    data = [{"paragraphs": [{"context": "It is Bo.", "qas": qas}]}]
    return {f"test-context-en-question-{language}.json": json.dumps({"version": version, "data": data})}


def mlqa_asked(question: str) -> tuple[str, tuple[str, ...]]:
    return MLQA.format("It is Bo.", question), ("Bo",)


RELATION = {"relation": "P19", "template": "[X] was born in [Y] ."}


def of_lama(**files: list[Any]) -> dict[str, str]:
    """Return LAMA's files with the records of some, by folder."""
    named = {f"{folder}/a.jsonl": "\n".join(map(json.dumps, records)) for folder, records in files.items()}
    return {"relations.jsonl": json.dumps(RELATION), **named}


BORN = {"pred": "/people/person/place_of_birth", "sub_label": "Ada", "obj_label": "London"}
TREX = {"predicate_id": "P19", "sub_label": "Bo", "obj_label": "Rome"}
TEMPLAMA = {"query": "Alex plays for _X_.", "answer": {"name": "Orlando"}, "date": "2012", "relation": "P54"}
PROBLEM = "<Problem><Body>Some.</Body><Question>How many? </Question><Solution-Type>Sum</Solution-Type>"
ASDIV = ["9 (apples)", "Mrs. Hilt", "1,200 (miles)", "2:3", "0.5", "17 (years old); 12 (years old)"]
PACK = {"Body": 'A "big" pack, new, costs 76.', "Question": "How much?", "Answer": 51.0, "Type": "Subtraction"}
PACK_ASKED = [('A "big" pack, new, costs 76. How much? The answer is', ("51.0",))]
PROBLEMS = {"iIndex": 1, "sQuestion": " Bo had 3. How many ?", "lEquations": ["X=3"], "lSolutions": [3.0]}
LISP = '(list (description "Bo \\"B\\" Lee") (description Umbaria) (description "Bo (town)"))'
HERB = {"question": "Which herb?", "answer": "Onion"}
HERB_ASKED = [(f"{ASK}Which herb?", ("Onion",))]
ONION = {"Value": "Onion", "Aliases": ["Onions", "Onion"], "NormalizedValue": "onion", "Type": "FreeForm"}
READ: list[tuple[str, dict[str, str], list[tuple[str, list[tuple[str, tuple[str, ...]]], dict[str, int]]]]] = [
    (
        "lama",
        of_lama(
            Squad=[
                {"masked_sentences": ["The show aired on [MASK]."], "obj_label": "CBS"},
                {"masked_sentences": ["The [MASK] color was used."], "obj_label": "gold"},
                {"masked_sentences": ["One.", "Two [MASK]."], "obj_label": "three"},
            ],
            Google_RE=[BORN, {**BORN, "pred": "/people/person/date_of_birth"}],
            TREx=[TREX, {**TREX, "predicate_id": "P0"}],
        ),
        [
            ("LAMA SQuAD", [(f"{LAMA}The show aired on", ("CBS",))], {"mask_not_last": 1, "several_sentences": 1}),
            (
                "LAMA Google-RE",
                [(f"{LAMA}Ada was born in", ("London",)), (f"{LAMA}Ada (born", ("London",))],
                {},
            ),
            ("LAMA T-REx", [(f"{LAMA}Bo was born in", ("Rome",))], {"unknown_relation": 1}),
        ],
    ),
    (
        "templama",
        {
            "t.jsonl": "\n".join(
                json.dumps({**TEMPLAMA, **changed})
                for changed in (
                    {},
                    {"answer": [{"name": "Orlando"}, {"name": "Portland"}]},
                    {"query": "_X_ is the head coach of Alex."},
                    {"answer": []},
                    {"answer": {"name": " "}},
                )
            )
        },
        [
            (
                "TempLAMA",
                [(f"{LAMA}Alex plays for", ("Orlando",)), (f"{LAMA}Alex plays for", ("Orlando", "Portland"))],
                {"mask_not_last": 1, "no_answer": 2},
            )
        ],
    ),
    (
        "asdiv",
        {"a.xml": f"<A>{''.join(f'{PROBLEM}<Answer>{answer}</Answer></Problem>' for answer in ASDIV)}</A>"},
        [
            (
                "ASDiv",
                [("Some. How many? The answer is", (answer,)) for answer in ("9", "1,200", "0.5")],
                {"answer_is_no_number": 3},
            )
        ],
    ),
    *(
        ("svamp", {name: content}, [("SVAMP", PACK_ASKED, left_out)])
        for name, content, left_out in (
            ("s.json", json.dumps([PACK, {**PACK, "Answer": "1/2"}]), {"answer_is_no_number": 1}),
            ("s.jsonl", json.dumps(PACK), {}),
            ("lines.json", json.dumps(PACK) + "\n" + json.dumps({**PACK, "Answer": "x"}), {"answer_is_no_number": 1}),
            ("marked.json", "\ufeff" + json.dumps([PACK]), {}),  # a byte-order mark
            ("s.csv", 'Body,Question,Answer\n"A ""big"" pack, new, costs 76.",How much?,51.0\n', {}),
        )
    ),
    (
        "mawps",
        {
            "b.jsonl": json.dumps({"input": "Joan had 2. How many ?", "target": 2}),
            "a.json": json.dumps([PROBLEMS, {**PROBLEMS, "lSolutions": [3.0, 4.0]}]),
        },
        [
            (
                "MAWPS",
                [("Bo had 3. How many ? The answer is", ("3.0",)), ("Joan had 2. How many ? The answer is", ("2",))],
                {"answer_is_no_number": 1},
            )
        ],
    ),
    (
        "webquestions",
        {"w.json": json.dumps([{"qText": "who is it?", "answers": ["Bo", "Bo", " "]}])},
        [("WebQuestions", [(f"{ASK}who is it?", ("Bo",))], {})],
    ),
    (
        "webquestions",
        {"o.json": json.dumps([{"url": "", "utterance": "who is it?", "targetValue": LISP}])},
        [("WebQuestions", [(f"{ASK}who is it?", ('Bo "B" Lee', "Umbaria", "Bo (town)"))], {})],
    ),
    (
        "nq",
        {
            "n.jsonl": "\ufeff"
            + "\n".join(
                json.dumps({"question": question, "answer": [answer]})
                for question, answer in (("who", "Bo"), ("Who \ud83d?", "Bo"), ("who", "Ada \ude00"))
            )
        },
        [("Natural Questions", [(f"{ASK}who?", ("Bo",))], {"not_utf8": 2})],
    ),
    (
        "triviaqa",
        {"t.jsonl": json.dumps({"context": "Question: Which herb?\nAnswer:", **HERB, "aliases": ["Onions", "Onion"]})},
        [("TriviaQA", [(f"{ASK}Which herb?", ("Onion", "Onions"))], {})],
    ),
    (
        "triviaqa",
        {"t.json": json.dumps({"Data": [{"Question": "Which herb?", "Answer": ONION}]})},
        [("TriviaQA", [(f"{ASK}Which herb?", ("Onion", "Onions"))], {})],
    ),
    *(
        ("triviaqa", {name: content}, [("TriviaQA", HERB_ASKED, {})])
        for name, content in (
            ("context.jsonl", json.dumps({"context": "Question: Which herb?\nAnswer:", "answer": "Onion"})),
            ("none.jsonl", json.dumps({**HERB, "aliases": None})),
            ("empty.jsonl", json.dumps({**HERB, "answer": {"value": "Onion", "aliases": []}})),
            ("value.jsonl", json.dumps({**HERB, "answer": {"value": "Onion"}})),
            ("own.json", json.dumps({"Data": [{"Question": "Which herb?", "Answer": {"Value": "Onion"}}]})),
            ("table.csv", "question,answer,aliases\nWhich herb?,Onion,[]\n"),
        )
    ),
    *(
        (benchmark, {form: content}, [(name, [(f"{ASK}who is it?", ("Bo", "Bo Lee"))], {})])
        for benchmark, name in (("nq", "Natural Questions"), ("triviaqa", "TriviaQA"), ("webquestions", "WebQuestions"))
        for form, content in {
            "answer.jsonl": '{"question": "who is it", "answer": ["Bo", "Bo Lee"]}\n',
            "answers.jsonl": '{"id": 1, "question": "who is it", "answers": ["Bo", "Bo Lee"]}\n',
            "golden.jsonl": '{"id": "a", "question": "who is it?", "golden_answers": ["Bo", "Bo Lee"]}\n',
            "list.json": '[{"question": "who is it", "answers": ["Bo", "Bo Lee"]}]',
            "headed.csv": 'id,question,answers\n1,who is it,"[\'Bo\', ""Bo Lee""]"\n',
            "numpy.csv": "question,golden_answers\nwho is it,['Bo' 'Bo Lee']\n",
            "dpr.qa.csv": "who is it\t['Bo', \"Bo Lee\"]\n",
            "dpr_quoted.tsv": '"who is it"\t"[\'Bo\', ""Bo Lee""]"\n',
        }.items()
    ),
    (
        "nq",  # a list with an item that Python cannot read is a text
        {"escape.csv": "question,answers\nwho is it,['\\x']\n"},
        [("Natural Questions", [(f"{ASK}who is it?", ("['\\x']",))], {})],
    ),
    ("mlqa", of_mlqa("de", a="Wo?"), [("MLQA (de)", [mlqa_asked("Wo?")], {})]),
    ("mlqa", of_mlqa("de", "xquad-1.1", a="Wo?"), [("XQuAD in MLQA's form (de)", [mlqa_asked("Wo?")], {})]),
    (
        "mlqa",  # without a question in English there is no benchmark of these
        {**of_mlqa("de", a="Wo?"), **of_mlqa("en", b="Where?")},
        [("MLQA (de)", [mlqa_asked("Wo?")], {})],
    ),
    (
        "mlqa",
        {**of_mlqa("de", a="Wo?", b="Wer?", c="Was?"), **of_mlqa("en", b="Who?", a="Where?")},
        [
            ("MLQA (de)", [mlqa_asked(asked) for asked in ("Wo?", "Wer?", "Was?")], {}),
            ("MLQA (de, all En)", [mlqa_asked("Where?"), mlqa_asked("Who?")], {"not_in_english": 1}),
        ],
    ),
    (
        "irrelevance",
        {
            "BFCL_v4_irrelevance.json": "\n".join(
                json.dumps({"id": "irrelevance_0", "question": question, "function": [{"name": "add"}]})
                for question in (
                    [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Bo?"}]],
                    [{"role": "user", "content": "Find Bo."}],
                    "Where is Bo?",
                    [[{"role": "system", "content": "Be brief."}]],
                )
            )
        },
        [
            (
                "BFCL_v4_irrelevance",
                [(ASK + asked, ("no call",)) for asked in ("Who is Bo?", "Find Bo.", "Where is Bo?")],
                {"nobody_asks": 1},
            )
        ],
    ),
    (
        "when2call",
        {
            "when2call_test_mcq.jsonl": "\n".join(
                json.dumps({"uuid": "1", "question": f"What {label}?", "correct_answer": label, "tools": []})
                for label in ("cannot_answer", "tool_call", "request_for_info", "direct")
            )
        },
        [
            (
                "When2Call",
                [(f"{ASK}What {label}?", ("no call",)) for label in ("cannot_answer", "direct")],
                {"tool_call": 1, "request_for_info": 1},
            )
        ],
    ),
]


@pytest.mark.parametrize(("name", "files", "expected"), READ, ids=lambda value: next(iter(value), "") if value else "")
def test_a_benchmark_is_read_in_each_form_it_is_passed_on_in(
    tmp_path: Path, name: str, files: dict[str, str], expected: list[Any]
) -> None:
    write(tmp_path, files)
    found = read_benchmark(name, tmp_path if name in FOLDERS else tmp_path / next(iter(files)))
    told = [
        (one.name, [(each.prompt, each.right_answers) for each in one.questions], one.left_out_counts) for one in found
    ]
    assert told == expected
    for one in found:
        assert one.withheld == WITHHELD.get(name, set()) and one.is_correct is RULES[name]
        assert one.requires_no_call == (name in ("irrelevance", "when2call"))
        assert {each.context for each in one.questions} == {"2012-01-01" if name == "templama" else ""}


GERMAN = "test-context-en-question-de.json"
OF_MLQA = r"question-de\.json,? {}.*; give the benchmark's own file"
REFUSED: list[tuple[str, dict[str, str], str]] = [
    *(
        ("templama", {"t.jsonl": json.dumps(TEMPLAMA) + "\n" + json.dumps({**TEMPLAMA, **wrong})}, reason)
        for wrong, reason in (
            ({"answer": {"name": None}}, r"t\.jsonl, record 2 has an unexpected shape \(.*no attribute 'strip'"),
            ({"date": "2010-05-01"}, r"t\.jsonl, record 2 has an unexpected shape \(.*2010-05-01"),
        )
    ),
    (
        "nq",
        {"nq.jsonl": '{"prompt": "who", "label": "Bo"}'},
        "nq.jsonl.*fields prompt, label; known: question or qText with a list",
    ),
    (
        "svamp",
        {"svamp.csv": "Question,Answer\nHow many?,3\n"},
        "svamp.csv.*fields Question, Answer; known: Body, Question and Answer",
    ),
    ("svamp", {"svamp.json": '{"examples": []}'}, "svamp.json.*holds no list; .*it has the fields examples"),
    (
        "nq",
        {"nq.csv": "question,answers\nwho,['Bo'],3\n"},
        r"nq.csv.*row 2 has 3 cells and not 2 \(question, answers\)",
    ),
    ("nq", {"nq.csv": 'question,answers\n"who"s,Bo\n'}, "nq.csv.*is not readable CSV"),
    (
        "mlqa",
        {f"{part}-context-en-question-de.json": '{"data": []}' for part in ("dev", "test")},
        r"dev-.*-de\.json and test-.*-de\.json have the same language; keep one",
    ),
    *(
        ("mlqa", {GERMAN: json.dumps(content)}, OF_MLQA.format(reason))
        for content, reason in (
            ({}, "holds no list 'data'"),
            ({"data": None}, "holds no list 'data'"),
            ({"data": {}}, "holds no list 'data'"),
            (
                {"data": [{"paragraphs": []}, {"context": "", "question": ""}]},
                "article 2 has an unexpected .*'paragraphs'",
            ),
            ({"data": [{"paragraphs": [{"qas": [{}]}]}]}, "article 1 has an unexpected shape .*'context'"),
            ({"data": [{"paragraphs": [{"context": ""}]}]}, "article 1 has an unexpected shape .*'qas'"),
            (
                {"data": [{"paragraphs": [{"context": "", "qas": [{}]}]}]},
                "record 1 has an unexpected shape .*'answers'",
            ),
        )
    ),
    *(
        (
            "lama",
            {"relations.jsonl": json.dumps(RELATION) + "\n" + json.dumps(record)},
            r"relations\.jsonl, record 2 has an unexpected shape .*; give the",
        )
        for record in ({"relation": "P1"}, [1], {"relation": "P1", "template": None})
    ),
    (
        "lama",
        {
            "relations.jsonl": "",
            "Squad/a.jsonl": "",
            "Squad/b.jsonl": json.dumps({"masked_sentences": ["It is [MASK]."], "obj_label": None}),
        },
        r"b\.jsonl, record 1 has an unexpected shape",
    ),
    (
        "mawps",
        {
            "a.jsonl": json.dumps({"input": "2 and 2", "target": 4}),
            "b.jsonl": json.dumps({"input": "2 and 2", "target": 4}) + "\n" + json.dumps({"input": "2 and 3"}),
        },
        r"b\.jsonl, record 2 has an unexpected shape \(KeyError: 'target'\)",
    ),
    *(
        (name, {"file": content}, message)
        for name, content, message in (
            ("svamp", "{", "is not readable JSON"),
            ("nq", '{"question": "who"}\n', "record 1 has an unexpected shape"),
            ("svamp", f"[{'1' * 5000}]", "is not readable JSON .*; give the benchmark's own file"),
            ("nq", "[" * 100_000, "line 1 is not readable JSON .*; give the benchmark's own file"),
            ("svamp", '[{"Body": "a",}]', "after a comma too many"),
            ("svamp", '{"Body": "a"},\n{"Body": "b"},\n', "line 1 .*after a comma too many"),
            ("svamp", "<!DOCTYPE html>", "HTML"),
            ("asdiv", "version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
            ("asdiv", "<A>", "is not ASDiv.xml"),
            ("asdiv", '<?xml version="1.0" encoding="foo"?><A/>', "is not ASDiv.xml .*; give the benchmark's own file"),
            (
                "asdiv",
                '<?xml version="1.0" encoding="big5"?><A/>',
                "is not ASDiv.xml .*; give the benchmark's own file",
            ),
            ("webquestions", '[{"qText": "who", "answers": "Bo"}]', "record 1 has an unexpected shape"),
            ("nq", '{"question": "who", "answer": "Bo"}', "record 1 has an unexpected shape"),
            ("triviaqa", '{"context": "Who?", "answer": "Bo", "aliases": "Bob"}', "record 1 has an unexpected shape"),
            ("svamp", "7", "holds no list"),
            ("webquestions", '{"qText": "who"}', "holds no list"),
        )
    ),
    *(
        ("triviaqa", {"t.json": content}, "holds no list 'Data'; give the benchmark's own file")
        for content in ("[]", "{}", '{"Data": {}}')
    ),
    *(
        (name, {}, message)
        for name, message in (("webquestions", "cannot be read"), ("mawps", "holds no"), ("mmlu", "known: lama"))
    ),
]


@pytest.mark.parametrize(("name", "files", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_benchmark_is_refused_with_its_file_and_what_is_wrong(
    tmp_path: Path, name: str, files: dict[str, str], message: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(BenchmarkError, match=message):
        read_benchmark(name, tmp_path if name in FOLDERS else tmp_path / next(iter(files), "file"))


ARTICLES = [
    " = One = \n \n Text . \n = = Part = = \n More . \n = 1 + a = \n said so . \n \n",
    " = Two = \n \n End . \n",
]


@pytest.mark.parametrize(
    ("content", "articles"),
    [
        ("\ufeff \n = One = \n \n Text . \n", [" = One = \n \n Text . \n"]),
        (" \n" + "".join(ARTICLES), ARTICLES),
        (" \n\n", None),
    ],
    ids=["byte order mark", "cut at titles", "nothing"],
)
def test_wikitext_is_a_list_of_articles_or_refused(tmp_path: Path, content: str, articles: list[str] | None) -> None:
    (tmp_path / "w.txt").write_text(content, encoding="utf-8")
    if articles is None:
        with pytest.raises(BenchmarkError, match="holds no text; give wiki"):
            read_wikitext_articles(tmp_path / "w.txt")
    else:
        assert read_wikitext_articles(tmp_path / "w.txt") == articles


def test_the_identity_of_a_benchmark_is_what_its_files_hold(tmp_path: Path) -> None:
    write(tmp_path, {"a/one.jsonl": json.dumps({"input": "2 and 2", "target": 4})})
    before = read_benchmark_identity("mawps", tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_benchmark_identity("mawps", tmp_path / "b") == before
    write(tmp_path, {"b/two.jsonl": ""})
    assert read_benchmark_identity("mawps", tmp_path / "b") != before
    assert read_benchmark_identity("dateset", tmp_path / "nothing") == "made"
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_benchmark_identity("mawps", tmp_path / "nothing")


REAL = {
    "lama": ("lama", 114),
    "templama": ("templama/templama_sample.jsonl", 1000),
    "asdiv": ("asdiv/ASDiv.xml", 39),
    "svamp": ("svamp/SVAMP.json", 1000),
    "mawps": ("mawps", 2065),
    "webquestions": ("webquestions/test.json", 2032),
    "nq": ("nq_open/NQ-open.dev.jsonl", 3610),
    "triviaqa": ("triviaqa/triviaqa_sm_sub.jsonl", 3000),
    "mlqa": ("mlqa_shaped", 6 * 1190),
    "dateset": ("", 9400),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(shared: Path, name: str) -> None:
    path, count = REAL[name]
    found = read_benchmark(name, shared / "data" / "benchmarks" / path)
    assert sum(len(benchmark.questions) for benchmark in found) == count
    for benchmark in found:
        for question in benchmark.questions:
            assert question.right_answers and question.prompt == question.prompt.strip()
        first = benchmark.questions[0]
        assert benchmark.is_correct(f" {first.right_answers[0]}", first.right_answers) or benchmark.name == "TempLAMA"


def test_a_part_of_a_benchmark_is_spread_over_its_kinds_and_is_another_measurement() -> None:
    def section(limit: int | None) -> EvaluationSettings:
        return EvaluationSettings(questions=0, benchmarks={"dateset": Path("made")}, benchmark_questions=limit)

    [whole], [part], [more] = (collect_chosen_benchmarks(section(limit), ()) for limit in (None, 60, 10**5))
    places = [whole.questions.index(question) for question in part.questions]
    assert more.questions == whole.questions and len(places) == 60
    assert {later - earlier for earlier, later in pairwise(places)} == {156, 157}
    assert {question.wording for question in part.questions} == {question.wording for question in whole.questions}
    assert build_questions_identity(section(60)) != build_questions_identity(section(None))
    assert "benchmark_questions" not in build_questions_identity(section(None))


def test_real_wikitext(shared: Path) -> None:
    articles = read_wikitext_articles(shared / "data" / "benchmarks" / "wikitext-2" / "test.txt")
    assert len(articles) == 60 and sum(len(article.split()) for article in articles) > 240_000


def test_asdiv_is_read_as_the_hub_has_it_too(tmp_path: Path) -> None:
    rows = [
        {"body": "Seven apples and two.", "question": "How many?", "answer": "9 (apples)", "solution_type": "Addition"},
        {"body": "Ann and Bo.", "question": "Who?", "answer": "Ann"},
    ]
    (tmp_path / "asdiv.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = read_benchmark("asdiv", tmp_path / "asdiv.jsonl")
    assert [(one.right_answers, "Seven apples" in one.prompt) for one in found.questions] == [(("9",), True)]
    assert sum(found.left_out_counts.values()) == 1
