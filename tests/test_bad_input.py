"""Files and directories that train.py cannot use: one line says what to fix."""

import json
import os
from unittest import mock

import numpy as np
from conftest import refused, spoiled_copy

# ---------------------------------------------------------------- paths
# fmt: off
FILES = {  # {name: content} of the files that are there when train.py gets the flags below
    "plain": "",
    "other/notes.txt": "not a run",
    "model/config.json": '{"model_type": "qwen2"}',
    "columns/train.jsonl": '{"text": "a", "label": "b"}',
    "unlike/train.jsonl": '{"question": "a", "answer": "b"}',
    "unlike/test.jsonl": '{"problem": "a", "solution": "b"}',
    "script/script.py": "raise SystemExit(0)",
    "pickle/train.pkl": "cos\nsystem\n(S'touch owned'\ntR.",
    "taken/tiny-seed1.0": "",
    "dir.jsonl/x": "",
    "broken/config.json": "{",
    "empty/config.json": '{"config": []}',
    "ended/config.json": '{"config": {}, "commit": "1"}',
}
PATHS = {  # {flags: what the message must say}
    "--out other": "is not a run of podgrpo",
    "--out model": "not a run",
    "--out empty": "is not a run of podgrpo",
    "--out broken": "not readable JSON",
    "--out plain": "cannot be made",
    "--out plain/run": "cannot be made",
    "--out " + "x" * 300: "cannot be made",
    "--out " + "x/" * 700: "is too long",
    "--out dangling": "directory",
    "--out taken": "Not a directory",
    "--model .": "config.json is missing",
    "--model no/such/dir": "there is no directory no/such/dir ",
    "--model a/b/c": "there is no directory a/b/c ",
    "--model ended": "ended is a run, not a model; try ended/final",
    "--model plain": "there is no directory plain ",
    "--data none.jsonl": "none.jsonl does not exist",
    "--data empty/config.json": "config.json holds a dict, not a list of rows",
    "--eval_data none.jsonl": "none.jsonl does not",
    "--data dir.jsonl": "does not exist, or is not a file",
    "--data .": "cannot be lo",
    "--data :main": ":main names no data set; try owner/name:config@split",
    "--data columns": "; give --eval_data none or columns@SPLIT",
    "--data columns --eval_data none": "columns has no question with an answer (row 1: ",
    "--data unlike": "; give --data unlike/FILE --eval_data unlike/OTHER, each",
    "--data script": "no longer supported",
    "--data pickle": "cannot be loaded",
}
# fmt: on


def check_messages(table):
    """Check that train.py refuses each (flags, what the message must say) in the table."""
    for flags, words in table:
        # Requests to the hub are retried after some seconds: do not wait.
        with mock.patch("time.sleep"):
            message = refused("--out run", flags)
        assert words in message, f"{flags}: {message!r} does not say {words!r}"
    # No mistake leaves files that would stop the next run.
    assert set(os.listdir("run")) <= {"tiny-seed1.0"}


def test_paths_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "dangling").symlink_to("gone")
    check_messages(PATHS.items())
    assert not os.path.exists("owned"), "a pickle was run"


# ---------------------------------------------------------------- questions
GOOD = '{"question": "What is 1 + 1?", "answer": "2"}\n'
# fmt: off
BAD_DATA = [  # (name of a .jsonl file, its content, what the message must say)
    # empty or incomplete
    ("empty", "", "empty.jsonl is empty"),
    ("blank", "\n\n", "blank.jsonl is empty"),
    ("cut", GOOD + '{"question": "What",\n', "line 1 column 21 (char 20)"),
    ("torn", GOOD + '{"question": "What', "torn.jsonl line 2"),
    ("lacks", '{"question": "What?"}\n', "lacks.jsonl line 1"),
    ("null", GOOD + '{"question": "What?", "answer": null}\n', "null.jsonl line 2"),
    ("other", '{"prompt": "a"}', "'answer'"),
    # JSON of the wrong type, or no JSON
    ("list", GOOD + GOOD + "[1]\n", "list.jsonl line 3"),
    ("list2", '{"question": "a", "answer": [2]}', "answer = [2]"),
    ("number", GOOD + '{"question": 5, "answer": 5}', "number.jsonl line 2"),
    ("inf", '{"question": "a", "answer": 1e999}', "answer = inf"),
    ("bool", '{"question": "a", "answer": true}', "bool.jsonl line 1"),
    ("nan", '{"question": "a", "answer": NaN}', "answer = nan"),
    ("demo", GOOD[:-2] + ', "demonstration": 7}', "demonstration = 7"),
    ("first", '{"question": "a", "answer": null, "response": "b"}' + "\n" + GOOD, "line 1 needs"),
    ("digits", '{"question": "a", "answer": ' + "9" * 5000 + "}", "digits.jsonl line 1"),
    ("deep", '{"question": ' + "[" * 99999, "deep.jsonl line 1"),
    ("two", GOOD.strip() + GOOD, "Extra data"),
    # texts that cannot be a prompt
    ("spaces", '{"question": " ", "answer": "2"}', "question = ' '"),
    ("marked", GOOD.replace("What", "<|im_end|>"), "marked.jsonl line 1: question = "),
    ("long", GOOD.replace("What", "What " * 99), "longer than max_prompt = 32"),
    # other encodings; \udce9 is written as the byte E9
    ("latin", GOOD.replace("What", "Qu\udce9"), "latin.jsonl line 1"),
    ("half", GOOD.replace("What", "\\ud800"), "half.jsonl line 1"),
    ("utf16", GOOD.encode("utf-16").decode("utf-8", "surrogateescape"), "line 1"),
]
# fmt: on


def test_questions_that_cannot_be_read_are_refused_by_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = []
    for name, text, words in BAD_DATA:
        (tmp_path / f"{name}.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
        table.append((f"--data {name}.jsonl --eval_data none", words))
    check_messages(table)


# ---------------------------------------------------------------- models
UP = "model.layers.1.mlp.up_proj.weight"
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
# fmt: off
BAD_MODELS = [  # (file, how to edit it, by conftest.edit, what the message must say)
    ("config.json", {"intermediate_size": 96}, "calls for (96, 128)"),
    ("config.json", {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
    ("config.json", QWEN3 | {"attention_bias": True}, "attention_bias = true"),
    ("config.json", QWEN3 | {"use_sliding_window": True}, "use_sliding_window = true"),
    ("config.json", {"vocab_size": 64}, "vocabulary has only 64 tokens"),
    ("config.json", {"hidden_size": 128.7}, "hidden_size = 128.7"),
    ("config.json", {"eos_token_id": -1}, "[-1]"),
    ("config.json", {"num_hidden_layers": 10**9}, "1000000000"),
    ("model.safetensors", None, 'has no model.safetensors; if the hub has the model in another '
     'format, run python -c \'from transformers import AutoModelForCausalLM as M; '
     'M.from_pretrained("HUB/ID").save_pretrained("DIR")\' and give --model DIR'),
    ("config.json", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling yarn"),
    ("config.json", {"rope_parameters": {"rope_type": "yarn"}}, "rope scaling yarn"),
    ("config.json", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("model.safetensors", b"junk" * 9, "not a safetensors file"),
    ("model.safetensors", {UP: None}, f"lacks the tensor {UP}"),
    ("model.safetensors", {UP: np.full((256, 128), 1, np.int8)}, "type I8"),
    ("model.safetensors", {"lm_head.weight": np.ones((7, 128))}, "differs from the embedding"),
    ("tokenizer.json", None, "tokenizer.json is missing"),
    ("tokenizer.json", b"{}", "not a readable tokenizer"),
    ("tokenizer.json", b"\xff", "tokenizer"),
    ("tokenizer_config.json", {"eos_token": "</s>"}, "has no token '</s>' to end an answer"),
    ("tokenizer_config.json", {"chat_template": ["{{ 1 }}"]}, "is not a list of named templates"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat template of"),
    ("tokenizer_config.json", {"chat_template": {"tools": ""}}, "chat templates tools, and no def"),
    ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
]
# fmt: on


def bad_tokenizers(tokenizer):
    """Returns [(how to edit tokenizer.json, what the message must say)].

    tokenizer: the content of a good tokenizer.json.
    """
    tokens = [t for t in tokenizer["added_tokens"] if t["content"] != "<|im_end|>"]
    vocab = tokenizer["model"]["vocab"]
    endless = {token: i for token, i in vocab.items() if token != "<|im_end|>"}
    no_end = {"added_tokens": tokens, "model": tokenizer["model"] | {"vocab": endless}}
    larger = {"model": tokenizer["model"] | {"vocab": vocab | {"zzz": 1000}}}
    return [
        (no_end, "has no token '<|im_end|>' to end an answer"),
        (larger, "largest token id is 1000"),
    ]


def test_models_that_cannot_be_used_are_refused(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(GOOD * 8)
    tokenizer = json.loads((tiny_directory / "tokenizer.json").read_text())
    bad_models = list(BAD_MODELS)
    for change, words in bad_tokenizers(tokenizer):
        bad_models.append(("tokenizer.json", change, words))
    table = []
    for i, (name, change, words) in enumerate(bad_models):
        spoiled_copy(tiny_directory, tmp_path / str(i), name, change)
        table.append((f"--data good.jsonl --model {i}", words))
    check_messages(table)


def test_weights_of_other_kinds_are_refused_with_how_to_convert(
    tiny_directory, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(GOOD * 8)
    names = {"bin": "pytorch_model.bin", "gguf": "q4.gguf"}
    for kind, name in names.items():
        spoiled_copy(tiny_directory, tmp_path / kind, "model.safetensors", None)
        (tmp_path / kind / name).write_bytes(b"")
    torch_model = "--data good.jsonl --model bin"
    gguf_model = "--data good.jsonl --model gguf"
    messages = [
        (torch_model, "bin has weights as pytorch_model.bin"),
        (torch_model, 'M.from_pretrained("bin").save_pretrained("bin")'),
        (gguf_model, 'M.from_pretrained("gguf", gguf_file="q4.gguf").save'),
    ]
    check_messages(messages)
