"""A published language model, SmolLM2-135M-Instruct, compared with transformers. The weights come
from the package index: tools/smollm2.py."""

import copy
import importlib.util

import pytest
from conftest import greedy_answers, logits

from infra.data import hf
from infra.rollout.engine import Engine
from test_kernel import mesh
from tools import smollm2

pytestmark = pytest.mark.slow
SYSTEM = "You are a calculator. Answer with the number only."
SUMS = zip(range(11, 91, 8), range(83, 13, -7), strict=True)
COLORS = "red green blue white black yellow brown grey pink gold".split()
QUESTIONS = [f"What is {a} + {b}?" for a, b in SUMS]
QUESTIONS += [f"Name {n} things that are {color}." for n, color in enumerate(COLORS, 2)]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Returns (directory of the model, the model in transformers)."""
    # The package of the weights cannot be imported without others, which the weights do not need.
    missing = [name for name in smollm2.NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    import transformers

    directory = str(tmp_path_factory.mktemp("smollm2"))
    smollm2.convert(smollm2.gguf_file(), directory)
    return directory, transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")


def test_logits_of_a_real_model_equal_transformers(real, record_property):
    import torch

    directory, theirs = real
    cfg = hf.read_config(directory)
    tokenizer = Engine.of_directory(directory, max_answer=8).tokenizer
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS[::5]]
    rows = tokenizer.encode([tokenizer.render(messages) for messages in asked])
    on = mesh(1, 8, 1)
    params = hf.load(hf.ModelFiles(directory, cfg), on)
    # In float64, transformers has no error to speak of.
    exact = copy.deepcopy(theirs).double()
    errors = []
    errors_of_theirs = []
    for row in rows:
        # Eight devices take eight rows.
        ours = logits(params, cfg, [row] * 8, on=on)[0]
        with torch.no_grad():
            wanted = exact(torch.tensor([row])).logits[0].numpy()
            in_float32 = theirs(torch.tensor([row])).logits[0].numpy()
        largest_logit = abs(wanted).max()
        errors.append(abs(ours - wanted).max())
        errors_of_theirs.append(abs(in_float32 - wanted).max())
    record_property("largest error of a logit", f"{max(errors):.1e}")
    record_property("of transformers in float32", f"{max(errors_of_theirs):.1e}")
    # As for the other models, the bound is relative to the largest logit, which is about 39 here.
    assert max(errors) <= 2e-5 * largest_logit


def test_greedy_answers_of_a_real_model_equal_transformers(real):
    import transformers

    directory, theirs = real
    engine = Engine.of_directory(directory, max_answer=60)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompts = []
    for question in QUESTIONS:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert engine.tokenizer.render(messages) == text
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    stop_ids = list(engine.model_cfg.stop_ids)
    wanted = greedy_answers(theirs, prompts, 60, eos_token_id=stop_ids)
    texts = [engine.tokenizer.decode(tokens) for tokens in wanted]
    assert len(QUESTIONS) == 20 and all(texts)
    assert engine.answer(QUESTIONS, SYSTEM) == texts
