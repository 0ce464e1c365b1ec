"""Questions and answers (infra/data/questions.py): data sets, prompts, and the rewards of
train.py."""

import concurrent.futures
import dataclasses
import fractions
import itertools
import json
import math
import re
import shutil
import threading
from unittest import mock

import datasets
import jax
import numpy as np
import pytest
import tokenizers
from conftest import (
    arguments,
    chatml,
    evaluations,
    load,
    logits,
    read_jsonl,
    refused,
    restored_signals,
    run_train,
    shared,
    spoiled_copy,
    step_rows,
)
from numpy.testing import assert_allclose
from safetensors.numpy import load_file

import train
from infra.data import answers, hf
from infra.data.chat import Tokenizer, load_tokenizer
from infra.data.questions import (
    check_row,
    check_same_data,
    checksum,
    examples_to_imitate,
    load_questions,
    load_rows,
)
from infra.data.reward_pool import data_columns
from infra.data.tiny import TINY_MODEL, arith, worked_sum
from infra.host import processes
from infra.host.console import check, first_line
from infra.run import log
from infra.run.run_dir import claimed_out

# ---------------------------------------------------------------- the rewards of train.py
# fmt: off
FORMATTED = {  # answer: 1 if it has a single <answer>number</answer>, at its end
    "1+1 <answer>2</answer>\n": 1,
    "2": 0,
    "<answer>2": 0,
    "<answer>2</answer> so": 0,
    "<answer>x</answer>": 0,
    "<answer>1</answer><answer>2</answer>": 0,
}
# fmt: on


def test_rewards_compare_final_numbers_and_look_at_the_form():
    assert train.correct({"answer": "#### 1,450"}, "so it is <answer>$1450.00</answer>") == 1
    assert train.correct({"answer": "#### 1450"}, "<answer>1451</answer> 1450") == 0
    assert train.correct({"answer": "no number"}, "no number") == 0
    for text, wanted in FORMATTED.items():
        assert train.formatted({}, text) == wanted, text


# ---------------------------------------------------------------- prompts
def test_a_tokenizer_that_truncates_and_pads_gives_complete_prompts(tiny_directory, tmp_path):
    """tokenizer.json may have settings for truncation and padding, which are not for training."""
    data = tmp_path / "rows.jsonl"
    questions = [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(99)]
    data.write_text("\n".join(map(json.dumps, questions)))

    def prompts(directory, out):
        # Without steps, no update is compiled.
        flags = ["--steps 0 --data", data, "--eval_data", data, "--model", directory, "--out", out]
        cfg = train.parse(arguments(flags))
        with restored_signals(), claimed_out(cfg.out):
            _, setup, _ = train.set_up(cfg, None)
        return [row["prompt_ids"] for rows in setup.held_out.values() for row in rows]

    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    tokenizer.enable_truncation(20)
    tokenizer.enable_padding(length=24)
    change = tokenizer.to_str().encode()
    truncating = spoiled_copy(tiny_directory, tmp_path / "truncating", "tokenizer.json", change)
    complete = prompts(tiny_directory, tmp_path / "complete")
    assert min(map(len, complete)) > 24, "nothing to truncate"
    assert prompts(truncating, tmp_path / "run") == complete


# ---------------------------------------------------------------- training and held-out questions
def write_sums(path, numbers):
    rows = [{"question": f"What is {i} + 1?", "answer": i + 1} for i in numbers]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_a_run_without_steps_loads_no_training_questions(tiny_directory, tmp_path):
    write_sums(tmp_path / "sums.jsonl", range(3))
    flags = ["--steps 0 --data nowhere.jsonl --eval_data", tmp_path / "sums.jsonl"]
    cfg = train.parse(arguments([*flags, "--model", tiny_directory, "--out", tmp_path / "out"]))
    tokenizer = load_tokenizer(str(tiny_directory))
    questions, examples, held_out = train.load_data(cfg, tokenizer, mock.Mock())
    assert questions == examples == []
    assert len(held_out["sums"]) == 3


def test_held_out_questions_that_are_trained_on_are_counted(tiny_directory, tmp_path, capsys):
    write_sums(tmp_path / "train.jsonl", range(40))
    write_sums(tmp_path / "test.jsonl", range(38, 43))
    flags = ["--data", tmp_path / "train.jsonl", "--eval_data", tmp_path / "test.jsonl"]
    cfg = train.parse(arguments([*flags, "--model", tiny_directory, "--out", tmp_path / "out"]))
    train.load_data(cfg, load_tokenizer(str(tiny_directory)), mock.Mock())
    said = capsys.readouterr().out
    assert "test (held out): 2 of 5 questions are also training questions\n" in said


# ---------------------------------------------------------------- data sets
def addends(row):
    numbers = re.findall(r"\d+", row["question"])
    return tuple(sorted(map(int, numbers)))


def test_arithmetic_answers_are_right_and_most_demonstrations_wrong(record_property):
    seen = arith(False)
    held_out = arith(True)
    assert len(seen) == 20000
    assert len(held_out) == 2000
    assert not {*map(addends, seen)} & {*map(addends, held_out)}
    for row in seen + held_out:
        assert answers.final_number(row["answer"]) == sum(addends(row)), row
    worked = "9+5+0=14 5+5+1=11 1+8+1=10 <answer>1014</answer>"
    assert worked_sum(159, 855) == worked
    demonstrated = [answers.final_number(row["demonstration"]) for row in seen]
    wrong = np.mean([d != sum(addends(row)) for d, row in zip(demonstrated, seen, strict=True)])
    assert 0.5 < wrong < 0.75
    record_property("wrong demonstrations", f"{wrong:.1%}")


def test_a_data_set_with_splits_is_read_by_split(tmp_path):
    sizes = {"train": 3, "test": 2}
    for split, n in sizes.items():
        rows = [json.dumps({"question": f"{split} {i}?", "answer": i}) for i in range(n)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    for split, n in sizes.items():
        wanted = [{"question": f"{split} {i}?", "answer": str(i)} for i in range(n)]
        assert load_rows(str(tmp_path), split == "test") == wanted


def test_equal_rows_of_a_set_are_one_question(tiny_directory, tmp_path, capsys):
    numbers = 1, 2, 1, 1, 3, 2
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in numbers]
    # Equal questions need not have equal answers.
    rows[2]["answer"] = "two"
    path = f"{tmp_path}/rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    tokenizer = load_tokenizer(tiny_directory)
    encoded = mock.Mock(side_effect=tokenizer.encode)
    cfg = train.Config(system="", sft_steps=1)
    with mock.patch.object(Tokenizer, "encode", lambda _, texts: encoded(texts)):
        questions = load_questions(path, False, tokenizer, cfg)
        examples = examples_to_imitate(questions, tokenizer, cfg)
    printed = "6 questions, 4 of them different; the answers of 1 questions are not numbers"
    assert printed in capsys.readouterr().out
    assert [(row["question"], row["answer"]) for row in questions] == [
        (row["question"], row["answer"]) for row in rows
    ]
    which = [0, 1, 2, 0, 4, 1]
    assert all(questions[i] is questions[k] for i, k in enumerate(which))
    assert all(examples[i] is examples[k] for i, k in enumerate(which))
    assert max(len(call.args[0]) for call in encoded.call_args_list) == 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = load_rows(f"{tmp_path}/rows.jsonl", False)
    assert all(rows[i] is rows[k] for i, k in enumerate(which))
    # Held-out questions are answered once, whatever their other columns are.
    rows = [row | {"index": i} for i, row in enumerate(rows)]
    datasets.Dataset.from_list(rows).to_parquet(path)
    held_out = load_questions(path, True, tokenizer, cfg)
    assert [row["index"] for row in held_out] == [0, 1, 2, 4]
    assert "4 questions; 2 repeats left out" in capsys.readouterr().out
    (only,) = load_questions(path, True, tokenizer, dataclasses.replace(cfg, eval_n=1))
    assert only["index"] == 0


def test_processes_with_different_data_are_refused(monkeypatch, capsys):
    """Each machine may have its own copy of a file."""
    rows = [{"prompt_ids": [i], "answer": str(i)} for i in range(3)]
    assert checksum(rows) == checksum([dict(row) for row in rows])
    example = rows[2] | {"demonstration_ids": [4]}
    others = rows[:2], [rows[1], rows[0], rows[2]], [*rows[:2], example]
    others = *others, [*rows[:2], rows[2] | {"answer": "9"}]
    assert len({checksum(other) for other in (rows, *others)}) == 5

    def gather(own):
        return np.array([own, own, [2, 3, own[2]]])

    monkeypatch.setattr("infra.data.questions.all_gather_processes", lambda own: np.array([own]))
    check_same_data(rows, [], {"set": rows})
    monkeypatch.setattr("infra.data.questions.all_gather_processes", gather)
    with pytest.raises(SystemExit) as end:
        check_same_data(rows, [], {"set": rows})
    said = capsys.readouterr().err
    crc = f"(CRC {checksum([*rows, *rows]):x})"
    counts = f"2 questions and 3 held out {crc}, and process 0 has 3 questions and 3 held out {crc}"
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"process 2 has different data from process 0: {counts}" in said, said


@pytest.mark.parametrize("fails", ["outside", "inside", "after"])
def test_processes_leave_nested_contexts_together(fails, monkeypatch, capsys):
    """One of two processes, which are threads here, exits: before the inner context, in it or after
    it. The other process is or will be in a gather, and must not wait there for ever."""
    barrier = threading.Barrier(2, timeout=10)
    given = {}

    def gather(value):
        given[threading.get_ident()] = value
        barrier.wait()
        found = np.array(list(given.values()))
        barrier.wait()
        return found

    def load(place):
        with processes.together("the data"):
            check(place != "outside", "no file")
            with processes.together("the set"):
                check(place != "inside", "no file")
            check(place != "after", "no file")

    monkeypatch.setattr(processes, "all_gather_processes", gather)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(load, place) for place in (fails, "")]
        assert [end.exception().code for end in ends] == [2, 2]
    said = capsys.readouterr().err
    assert said.count("no file") == 1 and said.count("not all processes have") == 1, said


def test_references_that_are_sentences_are_counted(tiny_directory, tmp_path, capsys):
    answers = ["2", "\\frac12", "1 + 1 = 2\n#### 2"]
    answers += ["So there are 2 of them.", "We get 2.", "\\sqrt2"]
    rows = [{"question": f"{i} + 1?", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(tiny_directory)
    load_questions(f"{tmp_path}/rows.jsonl", False, tokenizer, train.Config(system=""))
    printed = capsys.readouterr().out
    assert "6 questions; the answers of 2 questions are sentences without ####, " in printed
    assert "; the answers of 1 questions are not numbers" in printed


def test_columns_of_the_training_questions_need_not_be_those_of_other_sets(
    tiny_directory, tmp_path
):
    """The held-out questions here have the usual names."""
    rows = {"train": {"ask": "1 + 1?", "value": 2}, "test": {"question": "2 + 2?", "answer": "4"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    tokenizer = load_tokenizer(tiny_directory)
    data = f"{tmp_path}/train.jsonl"
    cfg = train.Config(data=data, columns="question=ask,answer=value", system="")
    (asked,) = load_questions(data, False, tokenizer, cfg)
    (held_out,) = load_questions(f"{tmp_path}/test.jsonl", True, tokenizer, cfg)
    assert (asked["answer"], held_out["answer"]) == ("2", "4")


def test_each_epoch_is_a_permutation_of_its_own():
    epochs = [train.question_order(3, epoch * 10, 10, 10) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert epochs[0] != epochs[1]
    # The walk does not depend on how hosts and steps divide it.
    assert train.question_order(3, 0, 30, 10) == sum(epochs, [])
    assert train.question_order(4, 0, 10, 10) not in epochs


def test_hosts_divide_the_questions_of_a_step(monkeypatch):
    rows = [{"number": number} for number in range(7)]
    cfg = train.Config(seed=3, batch=2, npq=3)
    seen = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for step, host in itertools.product(range(3), range(2)):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        of_host = [row["number"] for row in train.rows_of_step(rows, step, 2, cfg)]
        assert of_host == [number for number in of_host[::3] for _ in range(3)]
        seen += of_host[::3]
    assert seen == train.question_order(3, 0, 12, 7)


def test_a_data_set_that_the_hub_does_not_give_is_refused_in_its_words(tmp_path):
    for reply in ConnectionError("Couldn't reach it"), ValueError("no such data"):
        with mock.patch("datasets.load_dataset", side_effect=reply):
            text = refused("--data a/b --out", tmp_path / "run")
        assert f"a/b cannot be loaded: {first_line(reply)}" in text


def test_a_hub_that_does_not_answer_is_reported_in_one_line(tmp_path):
    closed = "http://127.0.0.1:9"
    # Unlike the other tests, this one is not offline from the start.
    env = {"HF_ENDPOINT": closed, "HF_HUB_OFFLINE": "0"}
    text = run_train("--data gsm8k --out", tmp_path / "run", code=2, **env)
    (line,) = (line for line in text.splitlines() if not line.startswith("rollout: "))
    assert "gsm8k cannot be loaded; the hub cannot be reached" in line, text
    assert "Connection refused" in line, text


def test_a_byte_order_mark_is_not_part_of_a_row(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes('\ufeff{"question": "1 + 1?", "answer": 2}\n'.encode())
    assert load_rows(str(rows), False) == [{"question": "1 + 1?", "answer": "2"}]


def test_a_number_as_answer_is_read_as_that_number():
    for number in (7, -0.5, 1e-05, 2e20, 1234567.89, 123456792.0, 2.0**-12, 0.1 + 0.2, 1e300):
        row = check_row({"question": "How much?", "answer": number})
        assert answers.final_number(row["answer"]) == fractions.Fraction(str(number)), row


def test_a_row_keeps_all_its_columns_for_reward_functions(tmp_path, tiny_directory):
    written = {"question": "1 + 1?", "answer": 2, "unit": "kg", "tests": [1, None], "note": None}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(written))
    tokenizer = load_tokenizer(tiny_directory)
    cfg = train.Config(system="", sft_steps=1)
    questions = load_questions(str(path), False, tokenizer, cfg)
    (row,) = examples_to_imitate(questions, tokenizer, cfg)
    ids = {"prompt_ids": chatml("", "1 + 1?"), "demonstration_ids": "2<|im_end|>"}
    ids = {name: tokenizer.encode([text])[0] for name, text in ids.items()}
    assert row == written | {"answer": "2"} | ids
    # Functions get the columns of the data.
    assert data_columns(row) == written | {"answer": "2"}


def test_a_line_of_metrics_that_is_no_row_is_reported_and_left_out(tmp_path, capsys):
    good = {"step": 1, "loss": 0.5}
    lines = [
        json.dumps(good),
        "junk",
        "[1]",
        "7",
        '{"loss": 1}',
        '{"step": "x"}',
        "\ufffd" * 9,
        "[" * 10**5,
    ]
    text = "\n".join([*lines, json.dumps({"step": 2})]) + '\n{"step": 3'
    (tmp_path / "metrics.jsonl").write_text(text)
    rows = log.read_jsonl(str(tmp_path / "metrics.jsonl"))
    assert rows == [good, {"step": 2}]
    said = capsys.readouterr().err
    for number in range(2, len(lines) + 1):
        assert said.count(f"metrics.jsonl line {number} is not a row of a step") == 1, said


def test_numbers_that_json_lacks_are_null():
    row = {"step": 1, "kl": math.nan, "grad_norm": math.inf, "nll": -math.inf, "lr": 0.5}
    assert json.loads(log.json_line(row), parse_constant=pytest.fail) == (
        {"step": 1, "kl": None, "grad_norm": None, "nll": None, "lr": 0.5}
    )


# ---------------------------------------------------------------- GSM8K
@pytest.mark.slow
def test_a_run_on_gsm8k_with_the_published_tokenizer(tmp_path):
    """Train a random model with the vocabulary of Qwen2.5, and load the result in transformers."""
    source = tmp_path / "source"
    out = tmp_path / "run"
    config = TINY_MODEL | dict(vocab_size=151936, hidden_size=64, eos_token_id=151645)
    source.mkdir()
    shutil.copy(shared("qwen2.5/tokenizer.json"), source)
    hf.write_random(source, config, seed=3)
    text = run_train(
        "--steps 2 --sft_steps 1 --batch 2 --npq 4 --max_answer 48 --max_prompt 96 --eval_n 16",
        # With an entropy bonus, answers are trained on even though all of them score 0.
        "--lr 1e-3 --micro_batch 1 --entropy_bonus 1e-6",
        *["--model", source, "--data", shared("gsm8k/train.jsonl")],
        *["--eval_data", shared("gsm8k/test.jsonl"), "--out", out],
        devices=2,
    )
    skipped = r"train.jsonl: \d+ questions; \d+ skipped, longer than max_prompt = 96"
    assert re.search(skipped, text), text
    rows = read_jsonl(out / "metrics.jsonl")
    metrics = step_rows(rows)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert [step for step, _ in evaluations(rows)] == [1, 3]
    assert metrics[1]["logprob_gap/max"] < 1e-4
    assert np.isfinite([row["loss"] for row in metrics]).all(), metrics

    # The rest needs another program that can read a checkpoint.
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "final", dtype=torch.float32)
    encode = transformers.AutoTokenizer.from_pretrained(out / "final")
    ids = encode("Natalia sold 48 clips").input_ids
    wanted = theirs(torch.tensor([ids])).logits.detach().numpy()
    assert_allclose(logits(*load(out / "final"), [ids]), wanted, atol=1e-4)
    start = load_file(source / "model.safetensors")
    end = theirs.state_dict()
    moved = max(abs(end[name].numpy() - start[name]).max() for name in end.keys() & start.keys())
    assert moved > 1e-4, "training changed nothing"


def test_prompts_of_just_max_prompt_tokens_are_kept(tiny_directory, tmp_path):
    rows = [{"question": "9" * n, "answer": "9"} for n in range(1, 9)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(tiny_directory)

    def lengths(max_prompt):
        cfg = train.Config(system="", max_prompt=max_prompt)
        found = load_questions(str(path), False, tokenizer, cfg)
        return [len(row["prompt_ids"]) for row in found]

    every = lengths(99)
    for most in {*every}:
        assert lengths(most) == [n for n in every if n <= most]


def test_questions_that_are_too_long_are_counted(tiny_directory, tmp_path, capsys):
    rows = [{"question": "9" * n, "answer": "9"} for n in (1, 200, 300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = train.Config(system="", max_prompt=100)
    load_questions(f"{tmp_path}/rows.jsonl", False, load_tokenizer(tiny_directory), cfg)
    assert "1 questions; 2 skipped, longer than max_prompt = 100" in capsys.readouterr().out


def test_demonstrations_of_just_max_answer_tokens_are_imitated(tiny_directory):
    tokenizer = load_tokenizer(tiny_directory)
    (tokens,) = tokenizer.encode(["9 + 9 = 18" + tokenizer.end])
    row = {"answer": "18", "demonstration": "9 + 9 = 18"}
    for most, found in ((len(tokens), [tokens]), (len(tokens) - 1, [])):
        cfg = train.Config(sft_steps=1, max_answer=most)
        examples = examples_to_imitate([row], tokenizer, cfg)
        assert [example["demonstration_ids"] for example in examples] == found
