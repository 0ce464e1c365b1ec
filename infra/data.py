"""Files, hub data sets and generated sums to rows; tokenizer, chat template, final numbers, the tiny model."""

import fractions
import glob
import json
import logging
import math
import os
import random
import re
import time
import urllib.error
import urllib.request
from functools import partial

import jax
import numpy as np
import tokenizers

from infra import files, hf
from infra.log import check, exit_on, say

TINY_MODEL = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=320, hidden_size=128, eos_token_id=2,
    intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4,
    max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05, torch_dtype="float32")

MARKS = r"<\|(?:im_start|im_end|endoftext)\|>|[\ud800-\udfff]"  # no text may hold them

def worked_sum(a, b, carry=True):
    """a + b by columns, units first: '9+5+0=14 5+5+1=11 1+8+1=10 <answer>1014</answer>' for 159 + 855."""
    steps, digits, c = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b))):
        total = int(x) + int(y) + c
        steps.append(f"{x}+{y}+{c}={total}")
        digits, c = str(total % 10) + digits, total // 10 if carry else 0
    return " ".join(steps) + f" <answer>{str(c) * bool(c) + digits}</answer>"

def arith(held_out):
    """Three-digit sums, 20,000 to train on and 2,000 held out. Three quarters of the demonstrations, which
    only supervised steps see, drop every carry: they teach the form and a mostly wrong procedure."""
    rng = random.Random(0)
    pairs = sorted({tuple(sorted((rng.randint(100, 999), rng.randint(100, 999)))) for _ in range(25000)})
    rng.shuffle(pairs)
    pairs = [rng.sample(pair, 2) for pair in pairs]
    return [{"question": f"What is {a} + {b}?", "answer": worked_sum(a, b),
             "demonstration": worked_sum(a, b, carry=i % 4 == 0)}
            for i, (a, b) in enumerate(pairs[:2000] if held_out else pairs[2000:22000])]

def hub_or_cache():
    """-> "", or why the hub gives no answer. Then its libraries take what they keep: they would ask for half
    a minute. To be called before they are imported."""
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=10).close()
    except urllib.error.HTTPError:
        pass  # an answer
    except OSError as e:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return f"; the hub gives no answer ({e}), and there is no copy here"
    return ""

def load_rows(name, held_out):
    """Rows with `question`, `answer` and maybe `demonstration`, which supervised steps imitate instead."""
    if name == "arith":
        return arith(held_out)
    rows, offline = [], "" if name.endswith(".jsonl") or os.path.exists(name) else hub_or_cache()
    with exit_on(Exception, f"{name} cannot be loaded{offline}"):
        if name.endswith(".jsonl"):
            check(os.path.isfile(name), f"{name} does not exist, or is no file")
            with open(name, encoding="utf-8-sig", errors="surrogateescape") as f:
                table = list(f)
        else:
            import datasets  # slow to import, and not needed for the others
            datasets.disable_progress_bars()
            logging.getLogger("huggingface_hub").setLevel("ERROR")  # it asks again, and warns each time
            path, _, part = ("openai/gsm8k:main" if name == "gsm8k" else name).partition(":")
            table = datasets.load_dataset(path, part or None, split="test" if held_out else "train")
    for number, row in enumerate(table, 1):
        if not isinstance(row, str) or row.strip():
            with exit_on(Exception, f"{name} line {number}: no JSON object with texts `question` and "
                         f"`answer` (which may be a number): {str(row)[:50]!r}"):
                if isinstance(row, str):
                    row = json.loads(row.encode().decode())  # encode raises for what was no UTF-8
                rows.append(read_row(row))
    check(rows, f"{name} is empty")
    return rows

def read_row(row):
    """A row of data, as text. Raises for what is none, or has marks of the chat, which would end a prompt."""
    row = {k: v for k, v in row.items() if v is not None}
    if type(row["answer"]) in (int, float) and math.isfinite(row["answer"]):  # 1e999 is none
        row["answer"] = str(row["answer"])
    row = {k: row[k] for k in ("question", "answer", "demonstration") if k in row}
    for k, value in row.items():
        if not isinstance(value, str) or not value.strip() or re.search(MARKS, value):
            raise ValueError(f"{k} = {value!a:.50} is no text, or holds a mark of the chat")
    return row

def chat(system, question):
    """Qwen's template, ChatML: system, user, and the opening of the answer."""
    return (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n")

def question_order(seed, start, count, n):
    """Places start .. start + count of an endless walk over n questions, a fresh permutation each epoch."""
    wanted = np.arange(start, start + count)
    epochs = {e: np.random.default_rng((seed, int(e))).permutation(n) for e in np.unique(wanted // n)}
    return [int(epochs[i // n][i % n]) for i in wanted]

# minus (not of a subtraction), currency, digits with or without thousands separators, decimals, a denominator
D = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"

NUMBER = re.compile(rf"((?<![\w)\]}}%])-)?(?:[$€£]\s?(-)?)?(?<![\^\d])({D})(?:\s?/\s?({D}))?")

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)")

def last_number(text):
    """The last number in a text as a Fraction, or None: '$1,450.' 1450, '-5' -5, '1/2' 1/2, '50%' 50."""
    try:
        minus, inner_minus, digits, below = NUMBER.findall(text)[-1]
        value = fractions.Fraction(digits.replace(",", "")) / fractions.Fraction(below.replace(",", "") or 1)
        return -value if minus or inner_minus else value
    except (IndexError, ZeroDivisionError, ValueError):  # none; x/0; more digits than Python converts
        return None

def final_number(text):
    """The final answer in a text as a Fraction, or None: the last number of the last <answer> that holds one,
    nested, unclosed or not; without such tags of the last \\boxed{}; else after ####; else of the text."""
    text = re.sub(r"\\([!,]|(?=[$%]))", "", text).replace("{,}", ",").replace("\u2212", "-")
    text = re.sub(r"\\[dt]?frac\{([\d.,]+)\}\{([\d.,]+)\}", r"\1/\2", text)
    marked = (re.findall(r"<answer>(.*?)(?=<answer>|</answer>|\Z)", text, re.S) or BOXED.findall(text)
              or re.findall(r"####(.*)", text) or [text])
    return next((number for number in map(last_number, reversed(marked)) if number is not None), None)

def make_tiny(directory, seed):
    """Write the tiny Qwen2 like any other: config, byte-level BPE with digits apart, random weights."""
    tokenizer, split = tokenizers.ByteLevelBPETokenizer(), tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence([
        split.Split(tokenizers.Regex(r"\p{N}| ?\p{L}+|\s| ?[^\s\p{L}\p{N}]"), "isolated"),
        split.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.train_from_iterator(
        [chat("", row["question"]) + row["answer"] for row in arith(False)[:99]], TINY_MODEL["vocab_size"],
        min_frequency=0, show_progress=False, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    os.makedirs(aside := f"{directory}.tmp", exist_ok=True)
    tokenizer.save(f"{aside}/tokenizer.json")
    files.write_json(f"{aside}/tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<|endoftext|>"))
    hf.write_random(aside, TINY_MODEL, seed)
    os.rename(aside, directory)
    return directory

def model_directory(cfg, *patterns):
    """Where the model's files are: a directory, a hub id's copy of the patterns, or the tiny one, made."""
    if cfg.model == "tiny":
        tiny = f"{cfg.out}/tiny-seed{cfg.seed}.{jax.process_index()}"
        return tiny if os.path.isdir(tiny) else make_tiny(tiny, cfg.seed)
    if os.path.isdir(cfg.model):
        for path in glob.glob(f"{glob.escape(cfg.model)}/*.*"):  # nobody may ever write to a pipe
            check(os.path.isfile(path) or not path.endswith((".json", ".safetensors")), f"{path} is no file")
        return cfg.model
    from huggingface_hub import errors, snapshot_download  # comes with tokenizers
    for wait in 1, 4, 0:
        with exit_on(Exception, f"model {cfg.model} is not a directory here, nor had from the hub"):
            try:
                return snapshot_download(cfg.model, allow_patterns=patterns)
            except errors.LocalEntryNotFoundError:  # no answer; "there is no such model" is another
                if not wait:
                    raise
        time.sleep(wait)


def load_tokenizer(directory):
    """-> (tokenizer, the id of <|im_end|>)"""
    with exit_on(Exception, f"{directory}/tokenizer.json is not a readable tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        start, end = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>"))
        ids = tokenizer.encode(text := "<|im_start|>What is 2 + 3?<|im_end|>", add_special_tokens=False).ids
        again = tokenizer.decode(ids, skip_special_tokens=False)
    check((ids[:1], ids[-1:], again) == ([start], [end], text), f"{directory}/tokenizer.json makes {again!r} "
          f"of {text!r}, or has no <|im_start|> and <|im_end|>: not the tokenizer of a Qwen2")
    return tokenizer, end

def load_questions(name, held_out, tokenizer, cfg):
    """Rows with the ids of `prompt` and of `told`, the text to imitate; too long prompts are left out."""
    what = f"held out ({name})" if held_out else name
    rows = load_rows(name, held_out)[:(cfg.eval_n if held_out else 0) or None]
    encode = partial(tokenizer.encode_batch, add_special_tokens=False)
    with exit_on(Exception, f"the tokenizer of {cfg.model} cannot encode {what}"):
        prompts = encode([chat(cfg.system, row["question"]) for row in rows])
        told = encode([row.get("demonstration", row["answer"]) + "<|im_end|>" for row in rows])
    kept = [row | {"prompt": p.ids, "told": t.ids} for row, p, t in zip(rows, prompts, told)
            if len(p.ids) <= cfg.max_prompt]
    shortest, fixed = min(len(p.ids) for p in prompts), len(encode([chat(cfg.system, "")])[0].ids)
    check(fixed < cfg.max_prompt, f"--system and the chat template alone take {fixed} tokens of max_prompt = "
          f"{cfg.max_prompt}; raise --max_prompt to {shortest} or more, or give a shorter --system")
    check(kept, f"all {len(rows)} prompts of {what} are longer than max_prompt = {cfg.max_prompt} tokens; "
          f"the shortest has {shortest}; raise --max_prompt")
    skipped, unmarked = len(rows) - len(kept), sum(final_number(row["answer"]) is None for row in kept)
    say(f"{what}: {len(kept)} questions" + f"; {skipped} skipped, longer than max_prompt = {cfg.max_prompt}"
        * (skipped > 0) + f"; {unmarked} have no number in their answer" * (unmarked > 0))
    return kept
