"""The tools that show learning: word problems, the comparison with TRL, and ablations."""

import collections
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import arguments, read_jsonl
from numpy.testing import assert_allclose

import train
from infra.data.answers import final_number
from infra.data.columns import choose_columns, rename
from tools import (
    ablations,
    bench_loss,
    bench_rollout,
    compare_trl,
    question_files,
    runs,
    smollm2,
    sums,
    word_problems,
    worked_answers,
)

TOOLS = [smollm2, sums, word_problems, worked_answers, compare_trl, ablations]
# fmt: off
MISTAKES = [  # (tool, flags, what the message must say)
    (sums, "", "required: OUT"),
    (sums, ".", ". exists; choose another"),
    (word_problems, "--out x", "required: --tokenizer"),
    (word_problems, "--tokenizer . --out x --seed one", "invalid int value: 'one'"),
    (word_problems, "--tokenizer . --out x --seed -1", "seed = -1 must be 0 or more"),
    (word_problems, "--tokenizer . --out .", "out = . exists"),
    (word_problems, "--tokenizer nowhere --out x", "nowhere/tokenizer.json is missing"),
    (smollm2, ".", ". exists; choose another"),
    (worked_answers, "gsm8k", "required: OUT"),
    (worked_answers, "gsm8k .", ". exists; choose another"),
    (worked_answers, "gsm8k x --most_steps 0", "most_steps = 0 leaves no question"),
    (worked_answers, "sums.jsonl x", "sums.jsonl has no held-out questions"),
    (worked_answers, "arith x", "arith has no answer of 1 to 2 steps in << >>"),
    (compare_trl, "--out x", "required: --model"),
    (compare_trl, "--model nowhere --out x", "model nowhere is not a directory"),
    (compare_trl, "--model . --out x --seeds 1,,2", "seeds 1,,2 must be numbers, as in 1,2,3"),
    (compare_trl, "--model . --out x --steps many", "invalid int value: 'many'"),
    (compare_trl, "--model . --out x --word 1", "unrecognized arguments: --word"),
    (compare_trl, "--model . --out x --advantage grpo", "= grpo is not translated for TRL"),
    (compare_trl, "--model . --out x --beta 0.1", "without the flag, it is 0.0"),
    (compare_trl, "--model . --out x --data x.jsonl", "give --steps of 1 or more"),
    (compare_trl, "--model . --out x --lora 4", "lora = 4 is not translated for TRL"),
    (compare_trl, "--model . --out x --seed 7", "this tool has --seeds, not --seed"),
    (compare_trl, "--model . --out .", "out = . exists; choose another"),
    (compare_trl, "--model . --out x --micro_batch 5", "micro_batch 5 does not divide the"),
    (compare_trl, "--model . --out x --micro_batch 4 --minibatches 2", "give --minibatches 1"),
    (ablations, "--model . --out x --seeds one", "seeds one must be numbers"),
    (ablations, "--model . --out x --variants default,best", "unknown variants ['best']"),
    (ablations, "--model . --out x --variants default,", "unknown variants [''];"),
    (ablations, "--model . --out .", "out = . exists; choose another"),
    (ablations, "--model nowhere --out x", "model nowhere is not a directory"),
    (ablations, "--model . --out x --word", "unrecognized arguments: --word; see --help"),
]
# fmt: on


BENCH_MISTAKES = [
    (bench_loss, "--time 0", "time = 0 must be 1 or more"),
    (bench_loss, "--iters 0", "iters = 0 must be 1 or more"),
    (bench_loss, "--block_tokens -7", "block_tokens = -7 must be 0 or more"),
    (bench_loss, "--temperature 0", "temperature = 0.0 must be above 0"),
    (bench_rollout, "--batch 0", "batch = 0 must be 1 or more"),
    (bench_rollout, "--answer 0", "answer = 0 must be 1 or more"),
    (bench_rollout, "--aot v6e-8 --lora -1", "lora = -1 must be 0 or more"),
]


def ended(tool, flags, capsys) -> tuple[int, str, str]:
    """Run a tool that exits before it does anything. Returns (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as end:
        tool.main(arguments([flags]))
    return end.value.code or 0, *capsys.readouterr()


def test_mistakes_are_one_line_and_help_is_help(capsys):
    for tool in TOOLS:
        code, shown, _ = ended(tool, "--help", capsys)
        assert code == 0 and tool.__doc__.split("\n")[0] in shown
    for tool, flags, words in MISTAKES + BENCH_MISTAKES:
        code, _, message = ended(tool, flags, capsys)
        assert code == 2 and words in message, f"{flags}: {message!r} does not say {words!r}"
        assert message.count("\n") == 1, message


# ---------------------------------------------------------------- sums
def test_sums_are_right_and_none_is_in_both_files(tmp_path):
    sums.main([f"{tmp_path}/sums"])
    pairs = {}
    for part in ("train", "test"):
        rows = read_jsonl(tmp_path / f"sums/{part}.jsonl")
        asked = [re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", row["question"]) for row in rows]
        numbers = [tuple(map(int, question.groups())) for question in asked]
        assert [sum(pair) for pair in numbers] == [int(row["answer"]) for row in rows]
        pairs[part] = {tuple(sorted(pair)) for pair in numbers}
        assert len(pairs[part]) == len(rows)
    assert len(pairs["train"]) == 3995 and len(pairs["test"]) == 100
    assert not pairs["train"] & pairs["test"]


def test_an_example_is_an_earlier_turn_of_each_sum(tmp_path):
    sums.main([f"{tmp_path}/sums"])
    sums.main([f"{tmp_path}/examples", "--example"])
    for part in ("train", "test"):
        rows = read_jsonl(tmp_path / f"examples/{part}.jsonl")
        chosen = choose_columns(rows, "")
        read = [rename(row, chosen) for row in rows]
        plain = read_jsonl(tmp_path / f"sums/{part}.jsonl")
        assert [{name: row[name] for name in ("question", "answer")} for row in read] == plain
        for row, original in zip(read, plain, strict=True):
            asked, answered, last = row["prompt_messages"]
            assert (asked["role"], answered["role"], last["role"]) == ("user", "assistant", "user")
            a, b = re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", asked["content"]).groups()
            assert answered["content"] == f"{a} + {b} = {int(a) + int(b)}"
            assert last["content"] == original["question"]


# ---------------------------------------------------------------- word problems
def result_of(question: str, first_sign: str) -> int:
    """Compute the answer to a question from its words. With first_sign `+`, add in the first step,
    where it should multiply."""
    groups, each = map(int, re.match(r"\w+ has (\d+) \w+ of (\d+) ", question).groups())
    total = groups * each if first_sign == "*" else groups + each
    for verb, number in re.findall(r"(buys|finds|loses|sells) (\d+)\.", question):
        total += int(number) if verb in ("buys", "finds") else -int(number)
    return total


def check_lines(text: str) -> int:
    """Check that each `a+b=c` in a text is right and begins with the result before it. Returns the
    last result."""
    results = []
    for left, sign, right, result in re.findall(r"(\d+)([*+-])(\d+)=(\d+)", text):
        computed = {"*": int(left) * int(right), "+": int(left) + int(right)}
        assert int(result) == computed.get(sign, int(left) - int(right)), text
        assert not results or int(left) == results[-1], text
        results.append(int(result))
    assert 2 <= len(results) <= 3
    return results[-1]


def test_word_problems_are_what_their_words_say():
    seed = random.SystemRandom().randrange(2**30)
    print(seed)  # pytest shows this if the test fails
    training, held_out = word_problems.problems(seed)
    assert len(training) == 20000 and len(held_out) == 500
    questions = {row["question"] for row in training}
    assert len(questions) == 20000 and not questions & {row["question"] for row in held_out}
    signs = collections.Counter()
    for row in training[:2000] + held_out:
        right = result_of(row["question"], "*")
        assert right > 0
        assert final_number(row["answer"]) == right == check_lines(row["answer"])
        # As in GSM8K, each step of the answer is in << >>.
        assert len(re.findall(r"<<\d+[*+-]\d+=\d+>>", row["answer"])) >= 2
        first_sign = re.search(r"\D", row["demonstration"])[0]
        shown = result_of(row["question"], first_sign)
        assert final_number(row["demonstration"]) == shown
        assert check_lines(row["demonstration"]) == shown
        signs[first_sign] += 1
    assert signs == {"*": 834, "+": 1666}


# ---------------------------------------------------------------- worked answers
def test_worked_answers_keep_short_ones_and_say_each_step_once(tmp_path):
    """Questions of more steps are left out, and so are answers without steps. Other `<` and `>`
    stay."""
    texts = {
        "one": "3*4=<<3*4=12>>12 pens, and 12 > 3.\n#### 12",
        "two": "1+1=<<1+1=2>>2\n2+1=<<2+1=3>>3\n#### 3",
        "three": "1+1=<<1+1=2>>2\n2+1=<<2+1=3>>3\n3+1=<<3+1=4>>4\n#### 4",
        "none": "#### 5",
    }
    rows = [
        {"question": name, "answer": text, "demonstration": "6"} for name, text in texts.items()
    ]
    question_files.write_sets(f"{tmp_path}/data", train=rows, test=rows[1:3])
    worked_answers.main([f"{tmp_path}/data", f"{tmp_path}/out"])
    one = {"question": "one", "answer": "3*4=12 pens, and 12 > 3.\n#### 12"}
    two = {"question": "two", "answer": "1+1=2\n2+1=3\n#### 3"}
    assert read_jsonl(tmp_path / "out/train.jsonl") == [one, two]
    assert read_jsonl(tmp_path / "out/test.jsonl") == [two]
    # Columns may have unusual names.
    odd = [{"ask": row["question"], "worked": row["answer"]} for row in rows]
    question_files.write_sets(f"{tmp_path}/odd", train=odd, test=odd[1:3])
    names = "--columns=question=ask,answer=worked"
    worked_answers.main([f"{tmp_path}/odd", f"{tmp_path}/renamed", names])
    assert read_jsonl(tmp_path / "renamed/train.jsonl") == [one, two]


# ---------------------------------------------------------------- TRL's options
def test_trl_gets_the_same_schedule_and_sizes(tmp_path):
    trl = pytest.importorskip("trl")
    import torch

    rng = random.SystemRandom()
    minibatches = rng.choice([1, 2, 4])
    flags = runs.tiny_flags(".") | compare_trl.SAME
    flags |= {"minibatches": minibatches, "ppo_epochs": rng.choice([1, 2]), "batch": 8, "npq": 4}
    flags |= {"lr": rng.uniform(1e-6, 1e-3), "warmup": rng.randrange(9), "steps": 12}
    flags |= {"clip_high": rng.uniform(0.2, 0.4), "decay": rng.choice(["linear", "cosine"])}
    flags |= {"micro_batch": rng.choice([0, 4])}
    print(flags)  # pytest shows this if the test fails
    cfg = train.parse(runs.words(flags | {"out": str(tmp_path)}))
    options = trl.GRPOConfig(**compare_trl.trl_options(cfg))
    # One rollout of 32 answers is for all updates of a step.
    assert options.generation_batch_size == 32
    at_once, passes = options.per_device_train_batch_size, options.gradient_accumulation_steps
    assert at_once == (cfg.micro_batch or 32 // minibatches)
    assert at_once * passes == 32 // minibatches
    assert (options.epsilon, options.epsilon_high) == (0.2, cfg.clip_high)
    assert (options.max_grad_norm, options.scale_rewards, options.beta) == (1.0, "none", 0)
    updates = minibatches * cfg.ppo_epochs
    assert options.max_steps == 12 * updates

    parameter = torch.nn.Parameter(torch.ones(3))
    adamw, schedule = compare_trl.optimizer_of(cfg, [parameter])
    for update in range(options.max_steps):
        expected = train.learning_rate(cfg, update // updates + 1)
        assert_allclose(schedule.get_last_lr(), [expected], rtol=1e-12)
        before = parameter.detach().numpy().copy()
        parameter.grad = torch.tensor([1.0, -2.0, 3.0])
        adamw.step()
        schedule.step()
        # With a constant gradient, Adam's step has the size of the learning rate.
        step = before - parameter.detach().numpy()
        assert_allclose(step, expected * np.array([1, -1, 1]), rtol=1e-3, atol=1e-7)


def loss_by_trl(cfg, mask, new, old, advantage) -> float:
    """TRL's own loss of answers, summed over the forward passes that its options ask for.

    mask, new, old: [answers, tokens], real tokens and logprobs. advantage: [answers].
    """
    import torch
    import trl

    at_once = compare_trl.answers_at_once(cfg)
    passes = len(mask) // at_once
    trainer = SimpleNamespace(
        loss_type=compare_trl.trl_loss_type(cfg),
        max_completion_length=cfg.max_answer,
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=0.0,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=passes,
        args=SimpleNamespace(delta=None, steps_per_generation=passes),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
        ),
        _metrics={"train": collections.defaultdict(list)},
    )

    def loss_of(some):
        logps = torch.tensor(new[some]), torch.zeros(new[some].shape), None
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: logps
        inputs = {
            "prompt_ids": torch.zeros(at_once, 1),
            "prompt_mask": torch.ones(at_once, 1),
            "completion_ids": torch.zeros(new[some].shape),
            "completion_mask": torch.tensor(mask[some], dtype=torch.int32),
            "advantages": torch.tensor(advantage[some]),
            "old_per_token_logps": torch.tensor(old[some]),
            "num_items_in_batch": torch.tensor(mask.sum()),
        }
        return trl.GRPOTrainer._compute_loss(trainer, None, inputs).item()

    return sum(loss_of(slice(i * at_once, (i + 1) * at_once)) for i in range(passes))


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("loss_agg", compare_trl.LOSS_TYPES)
def test_token_weights_are_those_of_trls_losses(loss_agg, micro_batch):
    """TRL's loss of answers of many lengths equals the loss by the token weights of
    train.make_rows."""
    pytest.importorskip("trl")
    rng = np.random.default_rng(0)
    rows, width = 6, 11
    sizes = dict(batch=2, npq=3, minibatches=1, micro_batch=micro_batch, max_answer=width)
    cfg = train.Config(loss_agg=loss_agg, **sizes)
    lengths = rng.integers(1, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    old = rng.normal(-2, 1, (rows, width))
    new = old + rng.normal(0, 0.3, (rows, width))
    advantage = rng.normal(0, 1, rows)
    got = loss_by_trl(cfg, mask, new, old, advantage)

    ratio = np.exp(new - old)
    clipped = np.clip(ratio, 0.8, 1.28)
    gain = np.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    answers = [[1] * n for n in lengths]
    packed = {i: [i] for i in range(rows)}
    made = train.make_rows(packed, [[1]] * rows, answers, advantage, (rows, width + 1), cfg, old)
    weight = made["weight"][:, :width]
    normaliser = lengths.sum() if loss_agg == "token" else rows
    assert_allclose(got, -(weight * gain).sum() / normaliser, rtol=1e-5)
