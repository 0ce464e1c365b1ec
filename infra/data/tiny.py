"""The built-in default: a tiny model with random weights, made in code, and sums to train it on."""

import functools
import os
import random

import tokenizers

from infra.data import columns, hf
from infra.data.chat import CHAT_TEMPLATE, compile_template
from infra.host import files

# config.json of the tiny model: two layers, 0.3M parameters, random weights.
TINY_MODEL = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    vocab_size=320,
    hidden_size=128,
    eos_token_id=2,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=1e4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    initializer_range=0.05,
    torch_dtype="float32",
)


# ---------------------------------------------------------------- generated sums
def worked_sum(a: int, b: int, carry: bool = True) -> str:
    """Work out a + b digit by digit, units first. a and b have the same number of digits. Without
    `carry`, the result is usually wrong.

    159 + 855 gives '9+5+0=14 5+5+1=11 1+8+1=10 <answer>1014</answer>'.
    """
    steps = []
    result = ""
    carried = 0
    # Begin with the units, since carries go to the left.
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carried
        steps.append(f"{x}+{y}+{carried}={total}")
        result = str(total % 10) + result
        if carry:
            carried = total // 10
    if carried:
        result = str(carried) + result
    return " ".join(steps) + f" <answer>{result}</answer>"


@functools.cache
def pairs_to_add() -> list[list[int]]:
    """At least 22,000 different pairs of three-digit numbers, in random order."""
    rng = random.Random(0)
    pairs = set()
    for _ in range(25000):
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        # Sort, since a + b and b + a are the same question: training and evaluation must not share
        # one.
        pairs.add((min(a, b), max(a, b)))
    pairs = sorted(pairs)
    rng.shuffle(pairs)
    # Either number may come first.
    return [rng.sample(pair, 2) for pair in pairs]


def arith(held_out: bool) -> list[dict]:
    """Three-digit sums: 20,000 rows for training, or 2,000 other rows for evaluation.

    Three quarters of the demonstrations drop every carry. Only supervised steps see demonstrations:
    they teach the format and a mostly wrong procedure, and leave the right one to GRPO.
    """
    part = slice(2000) if held_out else slice(2000, 22000)
    return [
        {
            "question": f"What is {a} + {b}?",
            "answer": worked_sum(a, b),
            "demonstration": worked_sum(a, b, carry=i % 4 == 0),
        }
        for i, (a, b) in enumerate(pairs_to_add()[part])
    ]


# ---------------------------------------------------------------- the model's files
def make_tiny(directory: str, seed: int) -> str:
    """Write the tiny Qwen2, with random weights, as a Hugging Face directory. Returns its path."""
    # The directory gets its name once it is complete.
    unfinished = f"{directory}.tmp"
    os.makedirs(unfinished, exist_ok=True)
    tiny_tokenizer().save(f"{unfinished}/tokenizer.json")
    # transformers needs to know the tokens that end answers and pad batches.
    tokenizer_config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    files.write_json(f"{unfinished}/tokenizer_config.json", tokenizer_config)
    hf.write_random(unfinished, TINY_MODEL, seed)
    os.rename(unfinished, directory)
    return directory


def tiny_tokenizer() -> tokenizers.ByteLevelBPETokenizer:
    """A byte-level BPE tokenizer, trained on 99 sums, with a token for each digit."""
    pre_tokenizers = tokenizers.pre_tokenizers
    # A digit | a word with the space before it | a space | a symbol with the space before it
    words = tokenizers.Regex(r"\p{N}| ?\p{L}+|\s| ?[^\s\p{L}\p{N}]")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    split = pre_tokenizers.Split(words, "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    template = compile_template(CHAT_TEMPLATE)
    texts = []
    for row in arith(False)[:99]:
        messages = columns.messages_of(row, system="")
        prompt = template.render(messages=messages, add_generation_prompt=True)
        texts.append(prompt + row["answer"])
    tokenizer.train_from_iterator(
        texts,
        TINY_MODEL["vocab_size"],
        min_frequency=0,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    return tokenizer
