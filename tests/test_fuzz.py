"""Spoiled files: whatever a file contains, it is refused in one line, or read as what it says."""

import contextlib
import io
import json
import math
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import load
from numpy.testing import assert_array_equal

import model
import train
from infra.data import hf
from infra.data.chat import load_tokenizer
from infra.data.questions import examples_to_imitate, load_questions, load_rows
from infra.data.tiny import TINY_MODEL
from infra.host import files

ODD_NUMBERS = [0, -1, 1, 7, 2**31, 2**64, 10**99, 1.5, -0.0, math.nan, math.inf]
ODD_TEXTS = ["", "x", "1", "128", "\ud800", "<|im_end|>", "default", "F16", "a" * 9999]
ODD_LISTS = [[], {}, [1], [None], [0, 8], {"a": 1}]
ODD_VALUES = [None, True, False, *ODD_NUMBERS, *ODD_TEXTS, *ODD_LISTS]
ODD_BYTES = [b"[", b'"', b"1", b"\xff"]


# ---------------------------------------------------------------- how files are spoiled
def places(value):
    """Returns (list or dict, index or key) for everything in a JSON value."""
    found = []
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def spoil_json(rng, text):
    """Replace one value with an odd one or with another value of the text, or remove it."""
    value = json.loads(text)
    everything = places(value)
    holder, key = rng.choice(everything)
    other, others_key = rng.choice(everything)
    holder[key] = rng.choice([*ODD_VALUES, other[others_key]])
    if rng.random() < 0.2:
        del holder[key]
    return json.dumps(value).encode()


def spoil_bytes(rng, data):
    """Remove, randomise, double or replace some bytes, in up to nine places."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 9])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([1, 1, 1, 4, 99]))
        twice = data[start:end] * 2
        data[start:end] = rng.choice(
            [b"", rng.randbytes(end - start), twice, rng.choice(ODD_BYTES)]
        )
    return bytes(data)


def spoil(rng, text):
    if rng.random() < 0.5:
        return spoil_json(rng, text)
    return spoil_bytes(rng, text)


def spoil_line(rng, text):
    """Spoil the JSON of one line of a .jsonl file, or the bytes of the file."""
    # The spoiled bytes may span two lines, so they are not limited to one.
    if rng.random() < 0.5:
        return spoil_bytes(rng, text)
    lines = text.split(b"\n")
    i = rng.randrange(len(lines))
    lines[i] = spoil_json(rng, lines[i])
    return b"\n".join(lines)


def spoil_header(rng, data):
    """Spoil the header of a safetensors file: eight bytes with its length, then JSON."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = spoil(rng, data[8:end])
    length = len(header)
    # Sometimes the length is wrong: that of the good header, or any.
    if rng.random() < 0.2:
        length = end - 8
    if rng.random() < 0.1:
        length += rng.randrange(2**60)
    return length.to_bytes(8, "little") + header + data[end:]


# ---------------------------------------------------------------- how they are read
@dataclass(frozen=True)
class Source:
    """A directory with a good model and questions, and the results of reading them."""

    directory: Path
    shape: model.ModelConfig
    weights: dict  # {flat name: NumPy array}


QUESTIONS = [
    {"question": f"What is {i} + 1?", "answer": i + 1, "demonstration": "so \u00e9"}
    for i in range(3)
]


@pytest.fixture
def source(tiny_directory, tmp_path):
    small = TINY_MODEL | dict(vocab_size=24, hidden_size=16, intermediate_size=8)
    hf.write_random(tmp_path, small, 0)
    shutil.copy(tiny_directory / "tokenizer.json", tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    params, shape = load(tmp_path)
    weights = {name: np.asarray(w) for name, w in model.flatten(params).items()}
    return Source(tmp_path, shape, weights)


def strict_config(config):
    """Returns the ModelConfig that config.json states literally. A null counts as absent."""
    config = {k: v for k, v in config.items() if v is not None}
    n_heads = config["num_attention_heads"]
    width = config["hidden_size"]
    stop_ids = config.get("eos_token_id", [])
    if not isinstance(stop_ids, list):
        stop_ids = [stop_ids]
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 1e4))
    return model.ModelConfig(
        V=config["vocab_size"],
        D=width,
        F=config["intermediate_size"],
        N=n_heads,
        K=config.get("num_key_value_heads", n_heads),
        H=config.get("head_dim", width // n_heads),
        L=config["num_hidden_layers"],
        rope_theta=float(theta),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        max_positions=config.get("max_position_embeddings", 32768),
        stop_ids=tuple(stop_ids),
    )


def read_config(source):
    found = hf.read_config(source.directory)
    text = (source.directory / "config.json").read_text()
    # Compare by repr, which tells 16 from 16.0 and 1 from True.
    assert repr(found) == repr(strict_config(json.loads(text)))


def read_tokenizer(source):
    tokenizer = load_tokenizer(source.directory)
    path = str(source.directory / "rows.jsonl")
    cfg = train.Config(system="", sft_steps=1)
    questions = load_questions(path, False, tokenizer, cfg)
    for row in examples_to_imitate(questions, tokenizer, cfg):
        assert max(row["prompt_ids"] + row["demonstration_ids"]) < tokenizer.size


def read_weights(source):
    checkpoint = hf.ModelFiles(source.directory, source.shape)
    for name, size in model.shapes(source.shape).items():
        found = checkpoint.read(name, [slice(0, n) for n in size])
        assert_array_equal(found, source.weights[name], name)


def read_questions(source):
    path = source.directory / "rows.jsonl"
    found = load_rows(str(path), False)
    lines = [line for line in path.read_text().split("\n") if line.strip()]
    wanted = []
    for line, found_row in zip(lines, found, strict=True):
        row = json.loads(line)
        # A number becomes text in digits, and must read as the same number.
        answer = type(row["answer"])(found_row["answer"])
        assert answer == row["answer"]
        wanted.append(row | {"answer": found_row["answer"]})
    # Compare by repr, because NaN is not equal to itself.
    assert repr(found) == repr(wanted)


# ---------------------------------------------------------------- the test
class HangError(BaseException):
    """Not a subclass of Exception, which would be reported as a mistake of the user."""


@contextlib.contextmanager
def no_longer_than(seconds):
    """Raise HangError if the block takes longer, unless it hangs in Rust or C."""

    def hang(*_):
        raise HangError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_read(read, source):
    """Returns whether a file was read. If not, checks that it was refused as a user's mistake."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            read(source)
            return True
        except files.CheckpointError as e:
            assert str(source.directory) in str(e)
        except SystemExit as e:
            assert e.code == 2
            assert stderr.getvalue().count("\n") == 1, stderr.getvalue()
    return False


KINDS = {
    "config.json": (spoil, read_config),
    "tokenizer.json": (spoil, read_tokenizer),
    "model.safetensors": (spoil_header, read_weights),
    "rows.jsonl": (spoil_line, read_questions),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_a_spoiled_file_is_refused_or_read_as_it_says(name, count, source, record_property):
    spoil_file, read = KINDS[name]
    path = source.directory / name
    good = path.read_bytes()
    rng = random.Random(0)
    n_read = 0
    for _ in range(count):
        # A file that is neither read nor refused stays in the test's directory.
        path.write_bytes(spoil_file(rng, good))
        with no_longer_than(60):
            n_read += is_read(read, source)
    assert n_read < count, "none was refused"
    path.write_bytes(good)
    read(source)
    record_property("read as they are", f"{n_read} of {count}")
