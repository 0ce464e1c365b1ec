"""Chat templates and special tokens (infra/data/chat.py), against transformers."""

import dataclasses
import datetime
import json
import shutil
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import tokenizers
from conftest import arguments, chatml, edit, load, refused, restored_signals, shared, spoiled_copy
from safetensors import safe_open

import train
from infra.data import hf
from infra.data.chat import default_template, load_tokenizer
from infra.data.questions import examples_to_imitate, load_questions
from infra.rollout.engine import Engine, with_stop_ids
from infra.run.run_dir import claimed_out
from test_kernel import mesh

# ---------------------------------------------------------------- templates of the forms in use


class Form(NamedTuple):
    """A chat template, written for these tests, with the form of a published model's."""

    template: str
    bos: str | None
    eos: str
    prompt: str  # of the messages ASKED
    end: str  # the token that the template writes after an answer


QWEN = """{%- if tools %}{{- 'TOOLS ' + tools | tojson }}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nDEFAULT<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last and message.reasoning_content is defined %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{% set ns = namespace(system='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}"
    "{%- endfor %}{{bos_token}}{{ns.system}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'].split('</think>')[-1] %}"
    "{{'<｜Assistant｜>' + content + '<｜end｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nDEFAULT<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Blocks on lines of their own: what they print depends on trim_blocks and lstrip_blocks.
TINYLLAMA = """{% for message in messages %}
  {% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
  {% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
  {% else %}
{{ '<|assistant|>
' + message['content'] + eos_token }}
  {% endif %}
  {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
  {% endif %}
{% endfor %}"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
# What templates of other models use.
OTHER = """{% macro turn(role, text) %}{{ "[" ~ role ~ "]" ~ text | trim }}{% endmacro %}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == "system" %}{% continue %}{% endif -%}
  {% if documents is none and tools is none %}{{ turn(message.role, message.content) }}{% endif %}
  {%- if message.role == "assistant" -%}
    {% generation %}{{ eos_token }}{% endgeneration %}
  {%- endif -%}
{%- endfor %}
{{ {"b": "<é'>", "a": [1, none]} | tojson(indent=1, sort_keys=true) }}
{%- if add_generation_prompt and not sep_token is defined %}[assistant]{% endif %}"""
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": " What is 2 < 3 & é?\n\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTrue."}
ASKED = [SYSTEM, {"role": "user", "content": "Why?"}]
MESSAGES = [[USER], [SYSTEM, USER], [USER, THOUGHT, USER], [SYSTEM, USER, THOUGHT, USER], ASKED]
BRIEF = chatml("  Be brief.\n", "Why?")
MATH = "Please reason step by step, and put your final answer within \\\\boxed{}."
# fmt: off
FORMS = {
    "Qwen2.5-Instruct": Form(
        QWEN.replace("DEFAULT", "You are a helpful assistant."), None, "<|im_end|>", BRIEF,
        "<|im_end|>"),
    # The eos token of a base model is not the one that ends a turn.
    "Qwen2.5-Math": Form(QWEN.replace("DEFAULT", MATH), None, "<|endoftext|>", BRIEF, "<|im_end|>"),
    "Qwen3": Form(QWEN3, None, "<|im_end|>", BRIEF, "<|im_end|>"),
    "R1-Distill-Qwen": Form(
        R1, "<｜begin｜>", "<｜end｜>",
        "<｜begin｜>  Be brief.\n<｜User｜>Why?<｜Assistant｜><think>\n", "<｜end｜>"),
    "SmolLM2": Form(
        SMOLLM2.replace("DEFAULT", "You are an assistant."), "<|im_start|>", "<|im_end|>", BRIEF,
        "<|im_end|>"),
    "TinyLlama": Form(
        TINYLLAMA, "<s>", "</s>",
        "<|system|>\n  Be brief.\n</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n", "</s>"),
    "Llama-3": Form(
        LLAMA3, "<s>", "</s>",
        "<s><|start|>system<|end|>\n\nBe brief.<|eot|><|start|>user<|end|>\n\nWhy?<|eot|>"
        "<|start|>assistant<|end|>\n\n", "<|eot|>"),
    "other": Form(
        OTHER, "<s>", "</s>",
        '<s>[user]Why?{\n "a": [\n  1,\n  null\n ],\n "b": "<é\'>"\n}[assistant]', "</s>"),
}
# fmt: on
SPECIAL = ["<｜begin｜>", "<｜end｜>", "<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"]


@pytest.fixture
def model_with(tiny_directory, tmp_path):
    """Returns a function that writes the tiny model with more tokens and another template."""

    def write(template, eos="<|im_end|>", bos=None, name="model"):
        directory = shutil.copytree(tiny_directory, tmp_path / name)
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.save(str(directory / "tokenizer.json"))
        # A token may be written as a dict.
        end = {"content": eos, "__type": "AddedToken", "special": True}
        change = {"eos_token": end, "bos_token": bos, "pad_token": None}
        edit(directory / "tokenizer_config.json", change | {"chat_template": template})
        return directory

    return write


# ---------------------------------------------------------------- prompts
@pytest.mark.parametrize("name", FORMS)
def test_prompts_equal_those_of_transformers(name, model_with):
    transformers = pytest.importorskip("transformers")
    form = FORMS[name]
    directory = model_with(form.template, form.eos, form.bos)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    for messages in MESSAGES:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode([text]) == [ids]
    assert ours.render(ASKED) == form.prompt
    assert ours.end == form.end
    answered = [USER, {"role": "assistant", "content": "4"}]
    text = theirs.apply_chat_template(answered, tokenize=False)
    assert ours.render(answered, answered=True) == text


def test_prompts_equal_those_of_the_published_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    shutil.copy(shared("qwen2.5/tokenizer.json"), tmp_path)
    form = FORMS["Qwen2.5-Instruct"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": form.eos}
    text = json.dumps(config | {"chat_template": form.template})
    (tmp_path / "tokenizer_config.json").write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for messages in MESSAGES:
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode([ours.render(messages)]) == [ids]
    assert ours.encode(["hello"]) == [[14990]]
    assert ours.stop_ids == {151645}


def test_a_template_is_found_where_transformers_finds_it(model_with):
    transformers = pytest.importorskip("transformers")
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "one"}]
    for name, in_config, in_file, wanted in (
        ("list", named, None, "one"),
        ("file", None, "two", "two"),
        ("both", "one", "two", "two"),
    ):
        directory = model_with(in_config, name=name)
        if in_file:
            (directory / "chat_template.jinja").write_text(in_file)
        assert load_tokenizer(directory).render([USER]) == wanted
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        assert theirs.apply_chat_template([USER], tokenize=False) == wanted


def test_special_tokens_may_be_in_a_file_of_their_own(model_with):
    transformers = pytest.importorskip("transformers")
    directory = model_with("{{ bos_token }}{{ messages[0].content }}")
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    wanted = theirs.apply_chat_template([USER], tokenize=False)
    assert load_tokenizer(directory).render([USER]) == wanted
    assert wanted.startswith("<s>")


def test_the_config_of_a_tokenizer_that_lists_its_tokens_names_them(model_with):
    transformers = pytest.importorskip("transformers")
    directory = model_with("{{ bos_token }}{{ messages[0].content }}", bos="<s>")
    listed = {"2": {"content": "<|im_end|>", "special": True}}
    edit(directory / "tokenizer_config.json", {"added_tokens_decoder": listed})
    (directory / "special_tokens_map.json").write_text('{"bos_token": "</s>"}')
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    wanted = theirs.apply_chat_template([USER], tokenize=False)
    assert load_tokenizer(directory).render([USER]) == wanted
    assert wanted.startswith("<s>")


def test_the_default_template_begins_as_the_tokenizer_begins_a_text(model_with):
    transformers = pytest.importorskip("transformers")
    for name, begin in (("adds", "<s>"), ("names", "")):
        directory = model_with(None, bos="<s>", name=name)
        path = str(directory / "tokenizer.json")
        bpe = tokenizers.Tokenizer.from_file(path)
        if begin:
            bos = "<s>", bpe.token_to_id("<s>")
            add = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
            bpe.post_processor = add
        # The tokenizers of some models pad, for other uses.
        bpe.enable_padding(direction="left", length=8)
        bpe.save(path)
        prompt = load_tokenizer(directory).render([USER])
        assert prompt == begin + chatml("", USER["content"])
        # final/ has this template.
        (directory / "chat_template.jinja").write_text(default_template(str(directory)))
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        ids = theirs.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
        assert load_tokenizer(directory).encode([prompt]) == [ids]


def test_a_template_may_write_the_date_and_says_so(model_with, capsys):
    directory = model_with("{{ strftime_now('%Y-%m') }}: {{ messages[0].content }}")
    before = datetime.datetime.now()
    text = load_tokenizer(directory).render([{"role": "user", "content": "Hi"}])
    after = datetime.datetime.now()
    assert text in {f"{now:%Y-%m}: Hi" for now in (before, after)}
    assert "writes today's date: prompts change from day to day" in capsys.readouterr().out


# ---------------------------------------------------------------- the system message
def prompts_of(directory, system, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": 2}')
    tokenizer = load_tokenizer(directory)
    (row,) = load_questions(str(path), False, tokenizer, train.Config(system=system))
    return tokenizer.bpe.decode(row["prompt_ids"], skip_special_tokens=False)


def test_an_empty_system_prompt_sends_no_system_message(model_with, tmp_path):
    roles = model_with("{{ messages | map(attribute='role') | join(', ') }}", name="roles")
    assert prompts_of(roles, "", tmp_path) == "user"
    assert prompts_of(roles, "Think.", tmp_path) == "system, user"
    # Qwen2.5's template then has a system message of its own.
    qwen = model_with(FORMS["Qwen2.5-Instruct"].template, name="qwen")
    assert prompts_of(qwen, "", tmp_path) == chatml("You are a helpful assistant.", "1 + 1?")


def test_the_tiny_model_has_the_prompts_that_it_always_had(tiny_directory, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_directory)
    for system in ("", "  Be brief."):
        prompt = chatml(system, "1 + 1?")
        assert prompts_of(tiny_directory, system, tmp_path) == prompt
        asked = [{"role": "system", "content": system}, {"role": "user", "content": "1 + 1?"}]
        # Without a system prompt, transformers may send an empty system message, or none.
        for messages in [asked] if system else [asked, asked[1:]]:
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert text == prompt
        answered = [*asked, {"role": "assistant", "content": "4"}]
        text = theirs.apply_chat_template(answered, tokenize=False)
        assert text == f"{prompt}4<|im_end|>\n"


def test_a_tokenizer_without_a_template_gets_chatml_and_passes_it_on(tiny_directory, tmp_path):
    transformers = pytest.importorskip("transformers")
    bare = spoiled_copy(tiny_directory, tmp_path / "bare", "tokenizer_config.json", None)
    tokenizer = load_tokenizer(bare)
    assert tokenizer.render(ASKED) == BRIEF
    assert tokenizer.stop_ids == {2}
    params, cfg = load(bare)
    hf.write_final(str(tmp_path), str(bare), params, cfg, mesh(), {})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "final")
    text = theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text == BRIEF


@pytest.mark.parametrize("named, dtype", [("bfloat16", "BF16"), ("float16", "F16"), (None, "F32")])
def test_final_has_the_dtype_that_the_config_names(named, dtype, tiny_directory, tmp_path):
    source = spoiled_copy(tiny_directory, tmp_path / "x", "config.json", {"torch_dtype": named})
    params, cfg = load(source)
    hf.write_final(str(tmp_path), str(source), params, cfg, mesh(), {})
    with safe_open(tmp_path / "final/model.safetensors", "np") as final:
        names = final.keys()
        found = {final.get_slice(name).get_dtype() for name in names}
    assert found == {dtype}


# ---------------------------------------------------------------- the answer
def test_stop_tokens_come_from_both_configs_the_tokenizer_and_the_template(model_with):
    directory = model_with(FORMS["Qwen2.5-Math"].template, eos="<|endoftext|>")
    edit(directory / "config.json", {"eos_token_id": 5})
    assert Engine.from_directory(directory).model_cfg.stop_ids == (0, 2, 5)
    (directory / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert Engine.from_directory(directory).model_cfg.stop_ids == (0, 2, 5, 6, 7)


@pytest.mark.parametrize(
    "generation, named",
    [
        (None, [0, 2]),
        ({"eos_token_id": 6, "temperature": 0.7}, [6, 0, 2]),
        ({"eos_token_id": [2, 0]}, [2, 0]),
        ({"temperature": 0.7}, [0, 2]),
    ],
)
def test_final_tells_transformers_which_tokens_end_an_answer(
    generation, named, model_with, tmp_path
):
    """A base model's eos is not the end of a turn, which its answers learn to end with."""
    transformers = pytest.importorskip("transformers")
    source = model_with(FORMS["Qwen2.5-Math"].template, eos="<|endoftext|>")
    edit(source / "config.json", {"eos_token_id": 0, "pad_token_id": 3})
    if generation:
        (source / "generation_config.json").write_text(json.dumps(generation))
    params, cfg = load(source)
    cfg = with_stop_ids(cfg, load_tokenizer(source).stop_ids)
    hf.write_final(str(tmp_path), str(source), params, cfg, mesh(), {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert theirs.generation_config.eos_token_id == named
    # Other settings stay.
    settings = generation or {"pad_token_id": 3}
    assert theirs.generation_config.pad_token_id == settings.get("pad_token_id")
    final = json.loads((tmp_path / "final/generation_config.json").read_text())
    assert final == settings | {"eos_token_id": named}


def test_the_end_of_an_answer_may_begin_with_another_special_token(model_with):
    directory = model_with("{% for message in messages %}{{ message.content }}<s>2{% endfor %}")
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>2"])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(str(directory)).end == "<s>2"


def test_the_end_of_an_answer_is_not_in_its_text(model_with):
    """transformers treats the eos token as special even if tokenizer.json does not."""
    directory = model_with(None, eos="</think>")
    tokenizer = load_tokenizer(str(directory))
    (ids,) = tokenizer.encode(["18</think>"])
    assert tokenizer.decode(ids) == "18" and ids[-1] in tokenizer.stop_ids


def test_rewards_get_what_the_model_wrote_after_the_template_opened_its_thoughts(
    model_with, tmp_path
):
    form = FORMS["R1-Distill-Qwen"]
    directory = model_with(form.template, form.eos, form.bos)
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{i} + 1?", "answer": i + 1, "demonstration": "Hm."} for i in range(9)]
    data.write_text("\n".join(map(json.dumps, rows)))
    # Without steps, no update is compiled.
    flags = ["--steps 0 --batch 1 --max_answer 16 --max_prompt 128 --out", tmp_path / "run"]
    flags += ["--model", directory, "--data", data, "--eval_data", data]
    cfg = train.parse(arguments(flags))
    with restored_signals(), claimed_out(cfg.out):
        _, setup, run = train.set_up(cfg, None)
    tokenizer = setup.engine.tokenizer
    questions = setup.held_out["rows"]
    rows = questions[:1] * 8
    prompt = tokenizer.bpe.decode(rows[0]["prompt_ids"], skip_special_tokens=False)
    assert prompt.endswith("?<｜Assistant｜><think>\n")
    # Supervised steps imitate a text that goes on where the prompt ends.
    with_supervised = dataclasses.replace(cfg, sft_steps=1)
    example, *_ = examples_to_imitate(questions, tokenizer, with_supervised)
    assert tokenizer.encode(["Hm.<｜end｜>"])[0] == example["demonstration_ids"]

    (answer,) = tokenizer.encode(["Hm.</think>4<｜end｜>"])
    written = {"tokens_BT": np.array([answer] * 8), "lengths_B": np.array([len(answer)] * 8)}

    with mock.patch.object(setup.engine, "generate", return_value=written):
        _, texts = train.sample_answers(rows, 8, None, None, setup, run)
    assert texts == ["Hm.</think>4"] * 8


# ---------------------------------------------------------------- what is refused
# fmt: off
BAD_TEMPLATES = [  # (template, what the message must say)
    # reaching for more than the messages
    ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    ("{{ cycler.__init__.__globals__.os }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{% set x = messages[0].update(content='') %}", "SecurityError"),
    ("{% include '/etc/passwd' %}", "TypeError: no loader"),
    ("{{ range(10**9) | list }}", "OverflowError: Range too big"),
    # mistakes
    ("{% for %}", "cannot be read: TemplateSyntaxError"),
    ("{{ 'a' + 1 }}", "TypeError"),
    ("{{ raise_exception('a\nb') }}", "TemplateError: a"),
    ("{{ messages[0].text.strip() }}", "UndefinedError"),
]
# fmt: on


def test_a_template_that_reaches_out_or_fails_is_refused_in_one_line(model_with, tmp_path, capsys):
    for i, (template, words) in enumerate(BAD_TEMPLATES):
        directory = model_with(template, name=str(i))
        with pytest.raises(SystemExit) as refusal:
            prompts_of(directory, "", tmp_path)
        text = capsys.readouterr().err
        assert refusal.value.code == 2
        assert words in text and f"the chat template of {directory}" in text, text
        assert text.count("\n") == 1, text
    # A run says the same.
    flags = ["--data", tmp_path / "rows.jsonl", "--model", directory, "--out", tmp_path / "run"]
    assert words in refused(*flags)


def test_a_template_without_system_messages_says_what_to_give(model_with, tmp_path, capsys):
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    directory = model_with(no_system + "{{ messages[0].content }}")
    with pytest.raises(SystemExit) as refusal:
        prompts_of(directory, "Think.", tmp_path)
    assert refusal.value.code == 2
    assert 'fails (if it takes no system message, give --system "")' in capsys.readouterr().err
    assert prompts_of(directory, "", tmp_path) == "1 + 1?"


def test_special_tokens_of_any_tokenizer_are_refused(model_with, tmp_path, capsys):
    form = FORMS["R1-Distill-Qwen"]
    tokenizer = load_tokenizer(model_with(form.template, form.eos, form.bos))

    def questions(question, system):
        path = tmp_path / "rows.jsonl"
        rows = [{"question": text, "answer": 2} for text in ("1 + 1?", question)]
        path.write_text("\n".join(map(json.dumps, rows)))
        return load_questions(str(path), False, tokenizer, train.Config(system=system))

    for token in SPECIAL + ["<|im_start|>"]:
        for question, system, words in (
            (f"1 {token}?", "", "rows.jsonl line 2"),
            ("2 + 2?", f"Be {token}.", f"holds '{token}', a special token of"),
        ):
            with pytest.raises(SystemExit):
                questions(question, system)
            text = capsys.readouterr().err
            assert words in text and "special token" in text, text
    # This tokenizer's tags of thoughts are not special.
    assert len(questions("1 </think>?", "Use <think>.")) == 2
