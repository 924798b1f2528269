"""The readers, on small files in the sources' own form and on the real ones where they are at hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from toolformer_dag.evaluation.benchmark_files import BenchmarkError, wikitext
from toolformer_dag.evaluation.catalogue import READERS, benchmark_identity, read_benchmark

LAMA = "Please complete the following text so that it is factually correct: "
ASK = "Answer the following question: "


def lines(file: Path, *records: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def test_lama(tmp_path: Path) -> None:
    lines(tmp_path / "relations.jsonl", {"relation": "P19", "template": "[X] was born in [Y] ."})
    lines(
        tmp_path / "Squad" / "test.jsonl",
        {"masked_sentences": ["The show aired on [MASK]."], "obj_label": "CBS"},
        {"masked_sentences": ["The [MASK] color was used."], "obj_label": "gold"},
        {"masked_sentences": ["One.", "Two [MASK]."], "obj_label": "three"},
    )
    born = {"pred": "/people/person/place_of_birth", "sub_label": "Ada", "obj_label": "London"}
    lines(tmp_path / "Google_RE" / "a.jsonl", born, {**born, "pred": "/people/person/date_of_birth"})
    lines(
        tmp_path / "TREx" / "P19.jsonl",
        {"predicate_id": "P19", "sub_label": "Bo", "obj_label": "Rome"},
        {"predicate_id": "P0", "sub_label": "Bo", "obj_label": "Rome"},
    )
    squad, google, trex = read_benchmark("lama", tmp_path)
    assert [(q.prompt, q.answers) for q in squad.questions] == [(f"{LAMA}The show aired on", ("CBS",))]
    assert squad.left_out == {"mask_not_last": 1, "several_sentences": 1}
    asked = [(q.prompt, q.answers) for q in google.questions]
    assert asked == [(f"{LAMA}Ada was born in", ("London",)), (f"{LAMA}Ada (born", ("London",))]
    assert google.left_out == {}
    assert [q.prompt for q in trex.questions] == [f"{LAMA}Bo was born in"] and trex.left_out == {"unknown_relation": 1}
    assert squad.withheld == google.withheld == trex.withheld == {"WikiSearch"}
    assert squad.correct(" the CBS network", ("CBS",)) and not squad.correct(" a b c d e CBS", ("CBS",))


def test_templama(tmp_path: Path) -> None:
    one = {"query": "Alex plays for _X_.", "answer": {"name": "Orlando"}, "date": "2012", "relation": "P54"}
    many = {**one, "answer": [{"name": "Orlando"}, {"name": "Portland"}]}
    coach = {**one, "query": "_X_ is the head coach of Alex."}
    file = lines(tmp_path / "t.jsonl", one, many, coach, {**one, "answer": []}, {**one, "answer": {"name": " "}})
    [found] = read_benchmark("templama", file)
    assert found.questions[0].prompt == f"{LAMA}Alex plays for" and found.questions[0].context == "2012-01-01"
    assert [q.answers for q in found.questions] == [("Orlando",), ("Orlando", "Portland")]
    assert found.left_out == {"mask_not_last": 1, "no_answer": 2}
    for wrong, reason in (({"answer": {"name": None}}, "no attribute 'strip'"), ({"date": "2010-05-01"}, "2010-05-01")):
        lines(tmp_path / "t.jsonl", one, {**one, **wrong})
        with pytest.raises(BenchmarkError, match=rf"t\.jsonl, record 2 has an unexpected shape \(.*{reason}"):
            read_benchmark("templama", file)


def test_a_question_with_half_a_character_is_left_out_and_counted(tmp_path: Path) -> None:
    good = {"question": "Who?", "answer": ["Ada"]}
    broken = [{**good, "question": "Who \ud83d?"}, {**good, "answer": ["Ada \ude00"]}]
    [found] = read_benchmark("nq", lines(tmp_path / "nq.jsonl", good, *broken))
    assert len(found.questions) == 1 and found.left_out == {"not_utf8": 2}


def test_mathematics(tmp_path: Path) -> None:
    answers = ["9 (apples)", "Mrs. Hilt", "1,200 (miles)", "2:3", "0.5", "17 (years old); 12 (years old)"]
    problem = "<Problem><Body>Some.</Body><Question>How many? </Question><Solution-Type>Sum</Solution-Type>"
    problems = "".join(f"{problem}<Answer>{answer}</Answer></Problem>" for answer in answers)
    (tmp_path / "a.xml").write_text(f"<A><ProblemSet>{problems}</ProblemSet></A>", encoding="utf-8")
    [asdiv] = read_benchmark("asdiv", tmp_path / "a.xml")
    assert asdiv.questions[0].prompt == "Some. How many? The answer is"
    assert [q.answers for q in asdiv.questions] == [("9",), ("1,200",), ("0.5",)]
    assert asdiv.left_out == {"answer_is_no_number": 3}
    assert asdiv.correct(" 1200", asdiv.questions[1].answers)
    record = {"Body": "A pack costs 76.", "Question": "How much?", "Answer": 51.0, "Type": "Subtraction"}
    (tmp_path / "s.json").write_text(json.dumps([record, {**record, "Answer": "1/2"}]))
    [svamp] = read_benchmark("svamp", tmp_path / "s.json")
    assert svamp.questions[0].prompt == "A pack costs 76. How much? The answer is"
    assert svamp.correct(" 76-25=51 dollars", svamp.questions[0].answers)
    assert len(svamp.questions) == 1 and svamp.left_out == {"answer_is_no_number": 1}
    lines(tmp_path / "mawps" / "b.jsonl", {"input": "Joan had 2. How many ?", "target": 2})
    problem = {"iIndex": 1, "sQuestion": " Bo had 3. How many ?", "lEquations": ["X=3"], "lSolutions": [3.0]}
    (tmp_path / "mawps" / "a.json").write_text(json.dumps([problem, {**problem, "lSolutions": [3.0, 4.0]}]))
    [mawps] = read_benchmark("mawps", tmp_path / "mawps")
    asked = [(q.prompt, q.answers) for q in mawps.questions]
    assert asked == [
        ("Bo had 3. How many ? The answer is", ("3.0",)),
        ("Joan had 2. How many ? The answer is", ("2",)),
    ]
    assert mawps.left_out == {"answer_is_no_number": 1}


def test_open_questions(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps([{"qText": "who is it?", "answers": ["Bo", "Bo", " "]}]))
    [web] = read_benchmark("webquestions", tmp_path / "w.json")
    assert (web.questions[0].prompt, web.questions[0].answers) == (f"{ASK}who is it?", ("Bo",))
    lisp = '(list (description "Bo \\"B\\" Lee") (description Umbaria) (description "Bo (town)"))'
    (tmp_path / "o.json").write_text(json.dumps([{"url": "", "utterance": "who is it?", "targetValue": lisp}]))
    [own] = read_benchmark("webquestions", tmp_path / "o.json")
    assert own.questions[0].answers == ('Bo "B" Lee', "Umbaria", "Bo (town)")
    [nq] = read_benchmark("nq", lines(tmp_path / "n.jsonl", {"question": "who", "answer": ["Bo"]}))
    assert nq.questions[0].prompt == f"{ASK}who?"
    record = {"context": "Question: Which herb?\nAnswer:", "answer": "Onion", "aliases": ["Onions", "Onion"]}
    [trivia] = read_benchmark("triviaqa", lines(tmp_path / "t.jsonl", record))
    assert (trivia.questions[0].prompt, trivia.questions[0].answers) == (f"{ASK}Which herb?", ("Onion", "Onions"))
    answer = {"Value": "Onion", "Aliases": ["Onions", "Onion"], "NormalizedValue": "onion", "Type": "FreeForm"}
    (tmp_path / "t.json").write_text(json.dumps({"Data": [{"Question": "Which herb?", "Answer": answer}]}))
    [own] = read_benchmark("triviaqa", tmp_path / "t.json")
    assert own.questions == trivia.questions
    assert web.withheld == nq.withheld == trivia.withheld == {"QA"}


OPEN_FORMS = {
    "answer.jsonl": '{"question": "who is it", "answer": ["Bo", "Bo Lee"]}\n' * 2,
    "answers.jsonl": '{"id": 1, "question": "who is it", "answers": ["Bo", "Bo Lee"]}\n',
    "golden.jsonl": '{"id": "a", "question": "who is it?", "golden_answers": ["Bo", "Bo Lee"]}\n',
    "list.json": '[{"question": "who is it", "answers": ["Bo", "Bo Lee"]}]',
    "headed.csv": 'id,question,answers\n1,who is it,"[\'Bo\', ""Bo Lee""]"\n',
    "numpy.csv": "question,golden_answers\nwho is it,['Bo' 'Bo Lee']\n",
    "dpr.qa.csv": "who is it\t['Bo', \"Bo Lee\"]\n",
    "dpr_quoted.tsv": '"who is it"\t"[\'Bo\', ""Bo Lee""]"\n',
}


@pytest.mark.parametrize("benchmark", ["nq", "triviaqa", "webquestions"])
@pytest.mark.parametrize("form", OPEN_FORMS)
def test_questions_and_answers_are_read_in_the_forms_they_are_passed_on_in(
    tmp_path: Path, benchmark: str, form: str
) -> None:
    (tmp_path / form).write_text(OPEN_FORMS[form])
    [found] = read_benchmark(benchmark, tmp_path / form)
    assert {(q.prompt, q.answers) for q in found.questions} == {(f"{ASK}who is it?", ("Bo", "Bo Lee"))}


def test_answers_of_trivia_qa_need_no_aliases(tmp_path: Path) -> None:
    records = [
        {"context": "Question: Which herb?\nAnswer:", "answer": "Onion"},
        {"question": "Which herb?", "answer": "Onion", "aliases": None},
        {"question": "Which herb?", "answer": {"value": "Onion", "aliases": []}},
        {"question": "Which herb?", "answer": {"value": "Onion"}},
    ]
    [found] = read_benchmark("triviaqa", lines(tmp_path / "t.jsonl", *records))
    assert {(q.prompt, q.answers) for q in found.questions} == {(f"{ASK}Which herb?", ("Onion",))}
    (tmp_path / "t.json").write_text(json.dumps({"Data": [{"Question": "Which herb?", "Answer": {"Value": "Onion"}}]}))
    [own] = read_benchmark("triviaqa", tmp_path / "t.json")
    assert own.questions == found.questions[:1]
    (tmp_path / "t.csv").write_text('question,answer,aliases\nWhich herb?,"Onion, red",[]\n')
    [table] = read_benchmark("triviaqa", tmp_path / "t.csv")
    assert [q.answers for q in table.questions] == [("Onion, red",)]


def test_svamp_is_read_as_a_list_as_lines_and_as_a_table(tmp_path: Path) -> None:
    record = {"Body": 'A "big" pack, new, costs 76.', "Question": "How much?", "Answer": 51.0}
    (tmp_path / "s.json").write_text(json.dumps([record, record]))
    lines(tmp_path / "s.jsonl", record, record)
    (tmp_path / "lines.json").write_text((tmp_path / "s.jsonl").read_text())
    (tmp_path / "s.csv").write_text("Body,Question,Answer\n" + '"A ""big"" pack, new, costs 76.",How much?,51.0\n' * 2)
    found = [read_benchmark("svamp", tmp_path / name)[0] for name in ("s.json", "s.jsonl", "lines.json", "s.csv")]
    assert all(one.questions == found[0].questions for one in found)
    assert found[0].questions[0].prompt == 'A "big" pack, new, costs 76. How much? The answer is'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nq.jsonl", '{"prompt": "who", "label": "Bo"}', "fields prompt, label; known: question or qText with a list"),
        ("svamp.csv", "Question,Answer\nHow many?,3\n", "fields Question, Answer; known: Body, Question and Answer"),
        ("svamp.json", '{"examples": []}', "holds no list; .*it has the fields examples"),
        ("nq.csv", "question,answers\nwho,['Bo'],3\n", r"row 2 has 3 cells and not 2 \(question, answers\)"),
        ("nq.csv", 'question,answers\n"who"s,Bo\n', "is not readable CSV"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_found_and_what_is_known(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BenchmarkError, match=f"{name}.*{message}"):
        read_benchmark(name.partition(".")[0], tmp_path / name)


def test_mlqa_and_its_likeness_are_told_apart(tmp_path: Path) -> None:
    asked = {"question": "Wo?", "answers": [{"text": "here"}, {"text": "here"}]}
    data = [{"paragraphs": [{"context": "It is here.", "qas": [asked]}]}]
    for version, name in (("1.0", "MLQA (de)"), ("xquad-1.1", "XQuAD in MLQA's form (de)")):
        (tmp_path / "test-context-en-question-de.json").write_text(json.dumps({"version": version, "data": data}))
        [found] = read_benchmark("mlqa", tmp_path)
        assert found.name == name
    (tmp_path / "test-context-en-question-en.json").write_text(json.dumps({"version": "1.0", "data": data}))
    assert [one.name for one in read_benchmark("mlqa", tmp_path)] == [name]
    assert found.questions[0].answers == ("here",)
    assert found.questions[0].prompt == (
        "Your task is to answer a question based on the following paragraph: It is here. "
        "Now answer the following question in English: Wo?"
    )


def test_the_same_questions_of_mlqa_are_asked_in_english(tmp_path: Path) -> None:
    for language, asked in (("de", {"1": "Wo?", "2": "Wer?", "3": "Was?"}), ("en", {"2": "Who?", "1": "Where?"})):
        qas = [{"id": key, "question": question, "answers": [{"text": "Bo"}]} for key, question in asked.items()]
        data = [{"paragraphs": [{"context": "It is Bo.", "qas": qas}]}]
        file = tmp_path / f"test-context-en-question-{language}.json"
        file.write_text(json.dumps({"version": "1.0", "data": data}))
    german, english = read_benchmark("mlqa", tmp_path)
    assert (german.name, english.name) == ("MLQA (de)", "MLQA (de, all En)")
    assert [one.prompt.rpartition("English: ")[2] for one in english.questions] == ["Where?", "Who?"]
    assert (len(german.questions), english.left_out) == (3, {"not_in_english": 1})


def test_mlqa_asks_in_one_file_per_language(tmp_path: Path) -> None:
    for name in ("dev-context-en-question-de.json", "test-context-en-question-de.json"):
        (tmp_path / name).write_text('{"data": []}')
    with pytest.raises(BenchmarkError, match=r"dev-.*-de\.json and test-.*-de\.json have the same language; keep one"):
        read_benchmark("mlqa", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds no list 'data'"),
        ({"data": None}, "holds no list 'data'"),
        ({"data": {}}, "holds no list 'data'"),
        (
            {"data": [{"paragraphs": []}, {"context": "", "question": ""}]},
            "article 2 has an unexpected .*'paragraphs'",
        ),
        ({"data": [{"paragraphs": [{"qas": [{}]}]}]}, "article 1 has an unexpected shape .*'context'"),
        ({"data": [{"paragraphs": [{"context": ""}]}]}, "article 1 has an unexpected shape .*'qas'"),
        ({"data": [{"paragraphs": [{"context": "", "qas": [{}]}]}]}, "record 1 has an unexpected shape .*'answers'"),
    ],
)
def test_what_is_not_of_mlqa_s_shape_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    lines(tmp_path / "test-context-en-question-de.json", content)
    with pytest.raises(BenchmarkError, match=rf"question-de\.json,? {message}.*; give the benchmark's own file"):
        read_benchmark("mlqa", tmp_path)


@pytest.mark.parametrize("record", [{"relation": "P1"}, [1], {"relation": "P1", "template": None}])
def test_a_relation_of_lama_without_its_template_is_refused(tmp_path: Path, record: Any) -> None:
    lines(tmp_path / "relations.jsonl", {"relation": "P19", "template": "[X] was born in [Y] ."}, record)
    with pytest.raises(BenchmarkError, match=r"relations\.jsonl, record 2 has an unexpected shape .*; give the"):
        read_benchmark("lama", tmp_path)


def test_the_file_of_a_folder_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        lines(
            tmp_path / name, {"input": "2 and 2", "target": 4}, *([{"input": "2 and 3"}] if name == "b.jsonl" else [])
        )
    with pytest.raises(BenchmarkError, match=r"b\.jsonl, record 2 has an unexpected shape \(KeyError: 'target'\)"):
        read_benchmark("mawps", tmp_path)
    lines(tmp_path / "relations.jsonl")
    for subset, records in (("a", []), ("b", [{"masked_sentences": ["It is [MASK]."], "obj_label": None}])):
        lines(tmp_path / "Squad" / f"{subset}.jsonl", *records)
    with pytest.raises(BenchmarkError, match=r"b\.jsonl, record 1 has an unexpected shape"):
        read_benchmark("lama", tmp_path)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    record = {"Body": "A pack costs 76.", "Question": "How much?", "Answer": 51.0, "Type": "Subtraction"}
    (tmp_path / "s.json").write_text(json.dumps([record]), encoding="utf-8-sig")
    (tmp_path / "n.jsonl").write_text('{"question": "who", "answer": ["Bo"]}\n', encoding="utf-8-sig")
    (tmp_path / "w.txt").write_text(" \n = One = \n \n Text . \n", encoding="utf-8-sig")
    for name, file in (("svamp", "s.json"), ("nq", "n.jsonl")):
        assert [len(found.questions) for found in read_benchmark(name, tmp_path / file)] == [1]
    assert wikitext(tmp_path / "w.txt") == [" = One = \n \n Text . \n"]


def test_wikitext_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text(" \n\n")
    with pytest.raises(BenchmarkError, match="holds no text; give wiki"):
        wikitext(tmp_path / "w.txt")


def test_wikitext_is_cut_at_titles(tmp_path: Path) -> None:
    text = " \n = One = \n \n Text . \n = = Part = = \n More . \n = 1 + a = \n said so . \n \n = Two = \n \n End . \n"
    (tmp_path / "w.txt").write_text(text)
    articles = wikitext(tmp_path / "w.txt")
    assert [article.split("\n")[0] for article in articles] == [" = One = ", " = Two = "]
    assert "".join(articles) == text.removeprefix(" \n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("svamp", "{", "is not readable JSON"),
        ("nq", '{"question": "who"}\n', "record 1 has an unexpected shape"),
        ("svamp", f"[{'1' * 5000}]", "is not readable JSON .*; give the benchmark's own file"),
        ("nq", "[" * 100_000, "line 1 is not readable JSON .*; give the benchmark's own file"),
        ("asdiv", "<A>", "is not ASDiv.xml"),
        ("asdiv", '<?xml version="1.0" encoding="foo"?><A/>', "is not ASDiv.xml .*; give the benchmark's own file"),
        ("asdiv", '<?xml version="1.0" encoding="big5"?><A/>', "is not ASDiv.xml .*; give the benchmark's own file"),
        ("webquestions", None, "cannot be read"),
        ("webquestions", '[{"qText": "who", "answers": "Bo"}]', "record 1 has an unexpected shape"),
        ("nq", '{"question": "who", "answer": "Bo"}', "record 1 has an unexpected shape"),
        ("triviaqa", '{"context": "Who?", "answer": "Bo", "aliases": "Bob"}', "record 1 has an unexpected shape"),
        ("mawps", None, "holds no"),
        ("svamp", "7", "holds no list"),
        ("webquestions", '{"qText": "who"}', "holds no list"),
        ("mmlu", None, "known: lama"),
    ],
)
def test_what_is_no_benchmark_is_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BenchmarkError, match=message):
        read_benchmark(name, file)


def test_a_table_without_its_list_is_refused(tmp_path: Path) -> None:
    for content in ("[]", "{}", '{"Data": {}}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(BenchmarkError, match="holds no list 'Data'; give the benchmark's own file"):
            read_benchmark("triviaqa", tmp_path / "t.json")


def test_the_identity_of_a_benchmark_is_what_its_files_hold(tmp_path: Path) -> None:
    lines(tmp_path / "a" / "one.jsonl", {"input": "2 and 2", "target": 4})
    before = benchmark_identity("mawps", tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert benchmark_identity("mawps", tmp_path / "b") == before
    lines(tmp_path / "b" / "two.jsonl")
    assert benchmark_identity("mawps", tmp_path / "b") != before
    assert benchmark_identity("dateset", tmp_path / "nothing") == "made"
    with pytest.raises(BenchmarkError, match="cannot be read"):
        benchmark_identity("mawps", tmp_path / "nothing")


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


@pytest.mark.parametrize("name", READERS)
def test_real_files(shared: Path, name: str) -> None:
    path, count = REAL[name]
    found = read_benchmark(name, shared / "data" / "benchmarks" / path)
    assert sum(len(benchmark.questions) for benchmark in found) == count
    for benchmark in found:
        for question in benchmark.questions:
            assert question.answers and question.prompt == question.prompt.strip()
        first = benchmark.questions[0]
        assert benchmark.correct(f" {first.answers[0]}", first.answers) or benchmark.name == "TempLAMA"


def test_real_wikitext(shared: Path) -> None:
    articles = wikitext(shared / "data" / "benchmarks" / "wikitext-2" / "test.txt")
    assert len(articles) == 60 and sum(len(article.split()) for article in articles) > 240_000
