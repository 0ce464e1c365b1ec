"""The files and columns of data sets, as on the Hugging Face hub (infra/data/columns.py)."""

import json

import datasets
import pytest

from infra.data import columns
from infra.data.questions import load_rows

ASK = "What is 1 + 1?"
SYSTEM = {"role": "system", "content": "Think."}
VERL_GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"content": ASK, "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"answer": "1 + 1 = 2\n#### 2", "index": 0, "question": ASK, "split": "train"},
}
SETS = {  # {data set on the hub: (a row of its form, the answer)}
    "gsm8k": ({"question": ASK, "answer": "1 + 1 = 2\n#### 2"}, "1 + 1 = 2\n#### 2"),
    "math": ({"problem": ASK, "level": "Level 1", "solution": r"\boxed{2}"}, r"\boxed{2}"),
    "math500": ({"problem": ASK, "solution": r"so \boxed{2}", "answer": "2"}, "2"),
    "dapo": (VERL_GSM8K | {"data_source": "math_dapo", "extra_info": {"index": "9a"}}, "2"),
    "verl": (VERL_GSM8K, "2"),
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("name", SETS)
def test_sets_of_the_hub_are_read_from_every_kind_of_file(name, kind, tmp_path, capsys):
    row, answer = SETS[name]
    if kind == "csv" and "prompt" in row:
        pytest.skip("a .csv file holds no messages")
    path = str(tmp_path / f"rows.{kind}")
    table = datasets.Dataset.from_list([row] * 3)
    if kind == "jsonl":
        (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    elif kind == "json":
        (tmp_path / "rows.json").write_text(json.dumps([row] * 3))
    else:
        getattr(table, f"to_{kind}")(path)
    rows = load_rows(path, False)
    assert [(row["question"], row["answer"]) for row in rows] == [(ASK, answer)] * 3
    # The chosen columns are printed unless they have the usual names.
    assert ("question = " in capsys.readouterr().out) == (name != "gsm8k")
    asked = {"role": "user", "content": ASK}
    assert columns.messages_of(rows[0], "") == [asked]
    assert columns.messages_of(rows[0], "Think.") == [SYSTEM, asked]


def test_messages_may_have_a_system_message_and_earlier_turns(tmp_path):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": ASK},
    ]
    answered = [*turns, {"role": "assistant", "content": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": answered}))
    (row,) = load_rows(str(path), False)
    assert (row["question"], row["answer"]) == (ASK, "2")
    # The prompt ends with the last question, without its answer.
    assert columns.messages_of(row, "Think.") == columns.messages_of(row, "") == turns
    row["prompt_messages"] = turns[1:]
    assert columns.messages_of(row, "Think.") == [SYSTEM, *turns[1:]]
    # A developer's message is a system message.
    path.write_text(json.dumps({"messages": [turns[0] | {"role": "developer"}, *answered[1:]]}))
    (row,) = load_rows(str(path), False)
    assert row["prompt_messages"] == turns


def test_a_column_may_have_a_dot_or_a_plus_in_its_name(tmp_path):
    row = {"body+question": ASK, "reward_model.ground_truth": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (read,) = load_rows(str(tmp_path / "rows.jsonl"), False)
    assert (read["question"], read["answer"]) == (ASK, "2")


def test_special_tokens_in_earlier_messages_are_refused(tmp_path, capsys):
    """A special token would end a message early."""
    turns = [SYSTEM | {"content": "Think.<end>"}, {"role": "user", "content": ASK}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns, "answer": "2"}))
    with pytest.raises(SystemExit):
        load_rows(str(path), False, refused="<end>")
    assert "'Think.<end>' has a special token: '<end>'" in capsys.readouterr().err


def test_messages_may_come_in_parts_and_beside_empty_columns(tmp_path):
    parts = [{"type": "text", "text": text} for text in (ASK[:4], ASK[4:])]
    asked = {"role": "user", "content": parts}
    answered = {"role": "assistant", "content": "2"}
    # Neither a null nor a column that happens to have our name counts.
    row = {
        "messages": [asked, answered],
        "answer": None,
        "prompt_messages": [{"role": "user", "content": "other"}],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (row,) = load_rows(str(path), False)
    assert row["question"] == ASK
    assert row["answer"] == "2"


@pytest.mark.parametrize(
    "row",
    [
        {"Question": ASK, " answer": "2"},
        {"instruction": ASK, "input": "", "output": "2"},
        {"problem": ASK, "final_answer": ["2"]},
        {"problem": ASK, "reward_model": {"ground_truth": '["2"]'}},
        {"prompt": [{"role": "user", "content": ASK}],
         "completion": [{"role": "assistant", "content": "2"}]},
        {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": "2"}]},
        {"problem": ASK, "expected_answer": 2, "solution": "1 + 1"},
        {"messages": [{"role": "user", "content": ASK, "from": None}], "answer": "2"},
        {"input": ASK, "instruction": "", "answer": 2},
    ],
)  # fmt: skip
def test_other_usual_forms_are_read(row, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (found,) = load_rows(str(path), False)
    assert (found["question"], found["answer"]) == (ASK, "2")


def test_rows_without_an_answer_are_skipped_in_a_set_that_users_cannot_mend(tmp_path, capsys):
    rows = [{"question": ASK, "answer": answer} for answer in ("2", " ", None, "3")]
    (tmp_path / "set").mkdir()
    path = tmp_path / "set/train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_rows(str(tmp_path / "set"), False)
    assert [row["answer"] for row in found] == ["2", "3"]
    assert "2 rows are skipped, such as row 2: ValueError: answer = ' '" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load_rows(str(path), False)
    said = capsys.readouterr().err
    assert "train.jsonl line 2 needs" in said and "the columns are question, answer" in said
    path.write_text(json.dumps({"ask": ASK, "reply": "2"}))
    with pytest.raises(SystemExit):
        load_rows(str(tmp_path / "set"), False)
    assert "KeyError: 'answer'); the columns are ask, reply; give" in capsys.readouterr().err


def test_a_malformed_row_of_a_set_that_users_cannot_mend_is_skipped(tmp_path, capsys):
    rows = [{"question": [{"role": "user", "content": text}], "answer": "2"} for text in (ASK, "")]
    rows.append({"question": [{"role": "tool", "content": ASK}], "answer": "2"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = load_rows(str(tmp_path), False)
    assert found["question"] == ASK
    assert "2 rows are skipped, such as row 2: ValueError: question = ''" in capsys.readouterr().out


def test_instructions_are_joined_with_inputs_that_may_be_empty(tmp_path):
    """Alpaca's form."""
    rows = [("What is 2 + 3?", "", "5"), ("Add the numbers.", "2, 3", "5")]
    names = "instruction", "input", "output"
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    found = load_rows(f"{tmp_path}/rows.jsonl", False)
    assert [row["question"] for row in found] == ["What is 2 + 3?", "Add the numbers. 2, 3"]


def test_columns_that_are_joined_may_hold_zero(tmp_path):
    """Zero is a value, though Python calls it false, as it does an empty text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"start": 0, "ask": ASK, "answer": 2}))
    (row,) = load_rows(f"{tmp_path}/rows.jsonl", False, "question=start+ask")
    assert row["question"] == f"0 {ASK}"


def test_a_column_of_32_bit_numbers_keeps_its_digits(tmp_path):
    kinds = {"question": datasets.Value("string"), "answer": datasets.Value("float32")}
    rows = {"question": [ASK] * 2, "answer": [0.1, 2.5]}
    table = datasets.Dataset.from_dict(rows, datasets.Features(kinds))
    table.to_parquet(tmp_path / "rows.parquet")
    rows = load_rows(f"{tmp_path}/rows.parquet", False)
    assert [row["answer"] for row in rows] == ["0.1", "2.5"]


def test_a_question_may_look_like_json(tmp_path):
    question = '[{"role": 1}] has how many?'
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": question, "answer": "1"}))
    (row,) = load_rows(str(path), False)
    assert columns.messages_of(row, "") == [{"role": "user", "content": question}]


def test_answers_of_a_csv_file_stay_as_they_are_written(tmp_path):
    """pandas would turn all of them into numbers, and read NA as a missing value."""
    texts = ["9007199254740993", "0.5", "18446744073709551616", "NA", "007"]
    lines = "".join(f"{ASK},{text},3\n" for text in texts)
    for header, named in (("problem,result", "answer=result"), ("Problem,Answer", "")):
        (tmp_path / "rows.csv").write_text(f"{header},words\n{lines},,\n")
        rows = load_rows(f"{tmp_path}/rows.csv", False, named)
        assert [row["answer"] for row in rows] == texts
        assert {row["words"] for row in rows} == {3}


def test_only_empty_fields_of_a_csv_file_are_missing(tmp_path):
    text = "question,answer,country,unit,note\n1 + 1?,2,NA,N/A,\n"
    (tmp_path / "rows.csv").write_text(text)
    (row,) = load_rows(str(tmp_path / "rows.csv"), False)
    assert (row["country"], row["unit"], row["note"]) == ("NA", "N/A", None)


def test_a_set_of_several_configs_asks_for_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"question": ASK, "answer": "2"})
    configs = []
    for name in ("main", "socratic"):
        (tmp_path / "sums" / name).mkdir(parents=True)
        (tmp_path / "sums" / name / "train.jsonl").write_text(row)
        configs.append({"config_name": name, "data_files": f"{name}/*"})
    (tmp_path / "sums/README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    with pytest.raises(SystemExit):
        load_rows("sums", False)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "['main', 'socratic']" in said
    assert "; give one as sums:CONFIG" in said
    assert len(load_rows("sums:main", False)) == 1
    # A directory may have such a name itself.
    (tmp_path / "sums/main").rename(tmp_path / "sums@v:1")
    assert len(load_rows("sums@v:1", False)) == 1


@pytest.mark.parametrize("turns", [None, ["text"], [{"role": "user", "content": "Other"}]])
def test_a_column_named_turns_is_not_the_prompt(turns, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": ASK, "answer": "2", "turns": turns}))
    (row,) = load_rows(str(path), False)
    assert columns.messages_of(row, "") == [{"role": "user", "content": ASK}]


def test_an_empty_column_that_was_chosen_is_not_replaced_by_another(tmp_path, capsys):
    rows = [{"question": "2 + 3?", "answer": "see the solution", "final": 5}]
    rows.append({"question": "3 + 3?", "answer": "see the solution", "final": None})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit):
        load_rows(f"{tmp_path}/rows.jsonl", False, "answer=final")
    assert "rows.jsonl line 2" in capsys.readouterr().err


def test_columns_of_other_names_are_named(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"ask": ASK, "meta": {"value": 2}, "answer": "none"}))
    (row,) = load_rows(str(path), False, "question=ask,answer=meta.value")
    assert (row["question"], row["answer"]) == (ASK, "2")
    # Columns may change places.
    path.write_text(json.dumps({"question": "2", "answer": ASK}))
    (row,) = load_rows(str(path), False, "question=answer,answer=question")
    assert (row["question"], row["answer"]) == (ASK, "2")
    with pytest.raises(SystemExit):
        load_rows(str(path), False, "answer=anwser")
    assert "no column anwser; the columns are question, answer" in capsys.readouterr().err
    # Held-out questions may come from a set that has the usual names.
    (row,) = load_rows(str(path), True, "question=ask,answer=gt", is_other_set=True)
    assert (row["question"], row["answer"]) == ("2", ASK)
    with pytest.raises(SystemExit):
        load_rows(str(path), True, "answer=anwser")
    assert "no column anwser; the columns are question, answer" in capsys.readouterr().err


def test_the_story_of_a_question_may_be_in_a_column_of_its_own(tmp_path, capsys):
    story = "There are 8 pens in 2 boxes."
    ask = "How many are in each?"
    path = tmp_path / "rows.jsonl"

    def questions_of(*rows, named=""):
        path.write_text("\n".join(map(json.dumps, rows)))
        return [row["question"] for row in load_rows(str(path), False, named)]

    # As in SVAMP, and as in ASDiv.
    for body, question in (("Body", "Question"), ("body", "question")):
        row = {body: story, question: ask, "Equation": "8 / 2", "answer": "4.0"}
        assert questions_of(row) == [f"{story} {ask}"]
        assert f"question = {body}+{question}" in capsys.readouterr().out
    # Not every row has a story.
    alone = {"question": ask, "answer": 4}
    others = [alone | {"body": ""}, alone | {"body": None}, alone]
    assert questions_of(row, *others) == [f"{story} {ask}", ask, ask, ask]
    capsys.readouterr()
    assert questions_of(*others) == [ask] * 3
    assert not capsys.readouterr().out
    # Messages are complete.
    asked = [{"role": "user", "content": ask}]
    assert questions_of({"body": story, "question": asked, "answer": 4}) == [ask]
    messages = {"body": story, "question": asked, "answer": 4}
    assert questions_of(alone | {"body": story}, messages) == [f"{story} {ask}", ask]
    row = {"context": story, "question": ask, "answer": 4}
    assert questions_of(row, named="question=context+question") == [f"{story} {ask}"]
    row["context"] = ""
    assert questions_of(row, named="question=context+question") == [ask]
    path = tmp_path / "rows.csv"
    path.write_text("a,b,answer\n1.50,How many?,2\n")
    for named, question in (("a+b", "1.50 How many?"), ("b+a", "How many? 1.50")):
        (row,) = load_rows(str(path), False, f"question={named}")
        assert row["question"] == question


def test_a_choice_among_usual_names_is_printed(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": ASK, "answer": 2}))
    load_rows(str(path), False)
    assert not capsys.readouterr().out
    path.write_text(json.dumps({"question": ASK, "answer": 2, "solution": "1 + 1 = 2"}))
    load_rows(str(path), False)
    assert "rows.jsonl: question = question, answer = answer" in capsys.readouterr().out


# fmt: off
UNREADABLE = [  # (name of a file, its content, words of the message)
    ("a.csv", "question,answer\nTom has 3, Ann 4. Both?,7\n", "quote texts that contain commas"),
    ("b.csv", "question,answer\nBoth?,7\nTom, Ann?,7\n", "Expected 2 fields in line 3, saw 3"),
    ("c.csv", "", "c.csv is empty"),
    ("c.csv", "question,answer\n", "c.csv is empty"),
    ("c.csv", "question;answer\nBoth?;7\n", "one column, 'question;answer'; separate fields with"),
    ("c.csv", "question,answer\nCaf\udce9?,7\n", "c.csv is not UTF-8; convert the file"),
    ("d.json", '[{"question": "x", "answer": }]', "Expecting value: line 1 column 30"),
    ("e.json", '{"data": []}', "holds a dict, not a list of rows"),
    ("f.jsonl", json.dumps({"prompt": str(VERL_GSM8K["prompt"]), "answer": 2}), "as a list"),
    ("f.jsonl", '[{"question": "x", "answer": 2}]', "line 1 is a list; if the file is one list"),
    ("f.jsonl", '{"question": "x"}', "as for a judge, answer=... may be any column of strings"),
    ("d.json", '[["question", "answer"]]', "d.json row 1 needs a string as question"),
    ("g.jsonl", json.dumps({"prompt": [{"role": "tool", "content": "x"}]}), "user or assistant\n"),
]
# fmt: on


@pytest.mark.parametrize("name, text, words", UNREADABLE)
def test_data_that_cannot_be_read_is_refused_with_the_reason(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit) as end:
        load_rows(f"{tmp_path}/{name}", False)
    assert end.value.code == 2
    assert words in capsys.readouterr().err.splitlines(keepends=True)[-1]


def test_a_directory_without_a_split_says_what_to_give(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": ASK, "answer": "2"}))
    assert len(load_rows(str(tmp_path), False)) == 1
    with pytest.raises(SystemExit):
        load_rows(str(tmp_path), True)
    assert f"; give --eval_data none or {tmp_path}@SPLIT" in capsys.readouterr().err
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    with pytest.raises(SystemExit):
        load_rows(str(tmp_path), False)
    assert f"; give {tmp_path}@SPLIT" in capsys.readouterr().err


def test_no_number_of_a_json_file_is_rounded(tmp_path):
    rows = [{"input": ASK, "answer": answer} for answer in (2**70 + 1, 2.5, "2024-05-06")]
    texts = [json.dumps(rows), "\n".join(map(json.dumps, rows))]
    for text in texts:
        (tmp_path / "rows.json").write_text(text)
        read = load_rows(f"{tmp_path}/rows.json", False)
        assert [row["answer"] for row in read] == [str(2**70 + 1), "2.5", "2024-05-06"]
