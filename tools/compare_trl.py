"""Train the same GRPO with this trainer and with TRL's GRPOTrainer, from one checkpoint.

    python train.py --steps 0 --sft_steps 80 --out out/cold
    pip install trl==1.16.0 torch transformers
    python tools/compare_trl.py --model out/cold/final --out out/compare

Flags of `train.py` may follow; their defaults are the embedded default's. For each seed, both
trainers get the same prompts in the same order, and the same rewards, learning rates and loss. This
trainer evaluates both, and evaluations are not timed. The metrics go to OUT/rows, as
podgrpo-seedN.jsonl and trl-seedN.jsonl. If other programs use the cores, too, put `taskset -c 0`
before the command: PyTorch's threads wait for each other in every operation.
"""

import argparse
import dataclasses
import importlib.util
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import train
from infra.data import columns, hf
from infra.data.chat import load_tokenizer
from infra.data.questions import load_questions
from infra.data.reward_pool import RewardPool
from infra.host.console import check, say
from tools import runs

# With these flags, both trainers compute the same loss. Advantages are r - mean, not divided: TRL
# divides by a different standard deviation, plus 1e-4. Without vLLM, TRL has no importance weight.
# None is needed, because in float32 the logprobs of sampler and trainer agree to 1e-5.
SAME = {"advantage": "drgrpo", "is_cap": 0.0}
# These flags are fixed: TRL defines the KL, the entropy bonus and weight decay differently, and
# this comparison does not translate the others.
LEFT_OUT = {
    "beta": 0.0,
    "entropy_bonus": 0.0,
    "weight_decay": 0.0,
    "optimizer": "adamw",
    "dtype": "auto",
    "rollout_dtype": "auto",
    "truncated": "zero",
    "lora": 0,
    "sft_steps": 0,
    "profile": 0,
}
# TRL's name of each loss_agg: mean over the tokens of one forward pass | mean over answers of the
# mean over an answer's tokens | mean over answers of the sum over an answer's tokens / max_answer.
LOSS_TYPES = {"token": "bnpo", "sequence": "grpo", "constant": "dr_grpo"}
# TRL's name of the mean over all tokens of a step, if a minibatch takes several forward passes.
MEAN_OVER_STEP = "dapo"


# ---------------------------------------------------------------- flags
def parse(argv: list[str]) -> tuple[argparse.Namespace, train.Config]:
    """Returns (the tool's own flags, the Config of the runs). A mistake prints one line and exits
    with code 2."""
    args, rest = runs.flags_parser(__doc__).parse_known_args(argv)
    runs.check_flags(args)
    defaults = runs.tiny_flags(args.model) | SAME | {"out": args.out}
    has_seed = any(word.partition("=")[0] == "--seed" for word in rest)
    check(not has_seed, "this tool has --seeds, not --seed")
    cfg = train.parse(runs.words(defaults) + rest)
    for name, value in (SAME | LEFT_OUT).items():
        given = getattr(cfg, name)
        check(
            given == value,
            f"{name} = {given} is not translated for TRL; without the flag, it is {value}",
        )
    is_evaluated = cfg.steps and len(train.eval_sets(cfg)) == 1
    check(is_evaluated, "give --steps of 1 or more, and exactly one set in --eval_data")
    check(
        answers_of_minibatch(cfg) % answers_at_once(cfg) == 0,
        f"micro_batch {cfg.micro_batch} does not divide the {answers_of_minibatch(cfg)} answers of "
        "a minibatch",
    )
    check(
        cfg.minibatches == 1 or trl_loss_type(cfg) != MEAN_OVER_STEP,
        f"with micro_batch {cfg.micro_batch}, TRL takes the mean over the tokens of a step, not of "
        f"each of {cfg.minibatches} minibatches; give --minibatches 1",
    )
    check(importlib.util.find_spec("trl"), "TRL is missing: pip install trl==1.16.0 torch")
    return args, cfg


def answers_of_minibatch(cfg: train.Config) -> int:
    """Returns the number of answers in one optimizer step."""
    return cfg.batch * cfg.npq // cfg.minibatches


def answers_at_once(cfg: train.Config) -> int:
    """Returns the number of answers in one forward pass of TRL: --micro_batch, or a complete
    minibatch. TRL does not pack answers, so a row is an answer."""
    return cfg.micro_batch or answers_of_minibatch(cfg)


def trl_loss_type(cfg: train.Config) -> str:
    """Returns TRL's name of loss_agg. A mean over the tokens of one forward pass would weigh the
    answers of short passes more, so several passes need the mean over all tokens of the step."""
    if cfg.loss_agg == "token" and answers_at_once(cfg) < answers_of_minibatch(cfg):
        return MEAN_OVER_STEP
    return LOSS_TYPES[cfg.loss_agg]


def trl_options(cfg: train.Config) -> dict:
    """Translate the flags to options of TRL's GRPOConfig.

    In TRL a step is one update. TRL generates the answers for `steps_per_generation` forward passes
    at once, and shuffles them before splitting them into updates; this trainer spreads each group
    evenly over the minibatches.
    """
    passes = answers_of_minibatch(cfg) // answers_at_once(cfg)
    # fmt: off
    return dict(
        output_dir=cfg.out, seed=cfg.seed,
        max_steps=cfg.steps * cfg.minibatches * cfg.ppo_epochs,
        # The rollout samples from the complete distribution.
        num_generations=cfg.npq, max_completion_length=cfg.max_answer,
        temperature=cfg.temperature, top_p=1.0, top_k=0,
        # The update.
        per_device_train_batch_size=answers_at_once(cfg),
        steps_per_generation=cfg.minibatches * passes, gradient_accumulation_steps=passes,
        num_iterations=cfg.ppo_epochs,
        epsilon=cfg.clip_low, epsilon_high=cfg.clip_high, beta=0.0, scale_rewards="none",
        loss_type=trl_loss_type(cfg), max_grad_norm=cfg.grad_clip,
        # The questions are already in order. No remat; compute in float32.
        shuffle_dataset=False, gradient_checkpointing=False, bf16=False, use_cpu=True,
        # This tool writes checkpoints and metrics itself.
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
    # fmt: on


def optimizer_of(cfg: train.Config, parameters) -> tuple:
    """Returns (AdamW, a scheduler that gives each update the learning rate of its step in
    `train.py`)."""
    import torch

    updates = cfg.minibatches * cfg.ppo_epochs
    # The scheduler multiplies this learning rate, so it is 1.
    adamw = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, cfg.b2), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda update: train.learning_rate(cfg, update // updates + 1)
    )
    return adamw, schedule


# ---------------------------------------------------------------- TRL's run
class Scorer:
    """A reward function for TRL that scores answers as `train.py` does: with its reward functions,
    on its rows of data, and 0 for a truncated answer."""

    __name__ = "reward"

    def __init__(self, questions: list[dict], tokenizer, stop_ids: set[int], pool: RewardPool):
        self.questions = questions
        self.pool = pool
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.rows = []  # one row of metrics per step

    def __call__(self, completion_ids, place, **_) -> list[float]:
        rows = [self.questions[i] for i in place]
        truncated = [ids[-1] not in self.stop_ids for ids in completion_ids]
        texts = [self.tokenizer.decode(ids) for ids in completion_ids]
        scores, _ = self.pool.score_answers(rows, texts, truncated)
        reward_B = train.rewards_of(scores)
        row = {
            "step": len(self.rows) + 1,
            "reward/mean": float(reward_B.mean()),
            "solved": float(scores[:, 0].mean()),
            "len/answer": float(np.mean([len(ids) for ids in completion_ids])),
        }
        self.rows.append(row)
        return reward_B.tolist()


def trl_process(cfg: train.Config) -> None:
    """Train with TRL in this process, whose reward workers start before torch has threads."""
    with train.reward_pool(cfg) as pool:
        train_with_trl(cfg, pool)


def train_with_trl(cfg: train.Config, pool: RewardPool) -> None:
    """Train with TRL. Writes a row per step to OUT/metrics.jsonl, and the weights to evaluate to
    OUT/step_N."""
    import datasets
    import torch
    import transformers
    import trl

    tokenizer = load_tokenizer(cfg.model)
    stop_ids = {*hf.read_config(cfg.model).stop_ids, *tokenizer.stop_ids}
    questions = load_questions(cfg.data, False, tokenizer, cfg)
    order = train.question_order(cfg.seed, 0, cfg.steps * cfg.batch, len(questions))
    asked = [columns.messages_of(questions[i], cfg.system) for i in order]
    prompts = [tokenizer.render(messages) for messages in asked]
    scorer = Scorer(questions, tokenizer, stop_ids, pool)

    theirs = transformers.AutoTokenizer.from_pretrained(cfg.model)
    encoded = theirs(text=prompts)["input_ids"]
    check(
        encoded == [questions[i]["prompt_ids"] for i in order],
        f"transformers adds tokens to the prompts of {cfg.model}, so TRL would ask other questions",
    )
    policy = transformers.AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    policy.generation_config.eos_token_id = sorted(stop_ids)

    class Clock(transformers.TrainerCallback):
        """Times each step, and saves the weights that will be evaluated."""

        def on_train_begin(self, *_, **__):
            self.began = time.monotonic()

        def on_step_end(self, args, state, control, **_):
            step, rest = divmod(state.global_step, cfg.minibatches * cfg.ppo_epochs)
            if rest:
                return
            scorer.rows[-1]["time/step_s"] = time.monotonic() - self.began
            say(f"trl: {scorer.rows[-1]}")
            if step in evaluated_steps(cfg):
                directory = f"{cfg.out}/step_{step}"
                policy.save_pretrained(directory)
                # Take config, tokenizer and chat template from the original checkpoint, but not its
                # index of weight files.
                for path in Path(cfg.model).iterdir():
                    is_index = path.name.endswith(".index.json")
                    if path.suffix in (".json", ".jinja") and not is_index:
                        shutil.copy(path, directory)
            # Start the next step's time here, so that saving is not timed.
            self.began = time.monotonic()

    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=scorer,
        args=trl.GRPOConfig(**trl_options(cfg)),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "place": order}),
        processing_class=theirs,
        optimizers=optimizer_of(cfg, policy.parameters()),
        callbacks=[Clock()],
    )
    trainer.train()
    runs.write_rows(f"{cfg.out}/metrics.jsonl", scorer.rows)


def evaluated_steps(cfg: train.Config) -> list[int]:
    """Returns the steps after which both trainers are evaluated, besides step 0."""
    every = cfg.eval_every or cfg.steps
    return sorted({*range(every, cfg.steps, every), cfg.steps})


# ---------------------------------------------------------------- both trainers
def run_trl(cfg: train.Config, before: dict) -> list[dict]:
    """Train with TRL, evaluate with `train.py`, and return the rows of both.

    before: the row of the checkpoint's evaluation, which comes first.
    """
    # A separate process keeps TRL's threads and memory away from this trainer's runs.
    process = multiprocessing.get_context("spawn").Process(target=trl_process, args=(cfg,))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)
    rows = [before]
    for row in runs.read_rows(cfg.out):
        rows.append(row)
        if row["step"] in evaluated_steps(cfg):
            model = f"{cfg.out}/step_{row['step']}"
            only_evaluated = {"model": model, "steps": 0, "out": f"{model}/evaluation"}
            runs.run_train(dataclasses.asdict(cfg) | only_evaluated)
            evaluated = runs.read_rows(f"{model}/evaluation")[-1]
            rows.append(evaluated | {"step": row["step"], "seconds": row["seconds"]})
    return rows


def summary(name: str, rows: list[dict]) -> str:
    """Describe a run: accuracy before and after, and the seconds that its steps took."""
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    return (
        f"{name:13} solved {rows[0]['eval/solved']:.1%} -> {runs.final_solved(rows):.1%}; "
        f"{len(seconds)} steps in {sum(seconds):.0f} s, the first {seconds[0]:.1f}, "
        f"median {runs.median_seconds(rows):.2f}"
    )


def main(argv: list[str]) -> None:
    args, cfg = parse(argv)
    # TRL trains on the CPU, see trl_options.
    os.environ["JAX_PLATFORMS"] = "cpu"
    lines = []
    for seed in args.seeds:
        # Run both trainers for one seed before the next seed, so that other load on the machine
        # affects both.
        names = [f"podgrpo-seed{seed}", f"trl-seed{seed}"]
        cfgs = [dataclasses.replace(cfg, seed=seed, out=f"{args.out}/{name}") for name in names]
        runs.run_train(dataclasses.asdict(cfgs[0]))
        ours = runs.read_rows(cfgs[0].out)
        theirs = run_trl(cfgs[1], before=ours[0])
        for name, rows in zip(names, (ours, theirs), strict=True):
            runs.write_rows(f"{args.out}/rows/{name}.jsonl", rows)
            lines.append(summary(name, rows))
        ratio = runs.median_seconds(theirs) / runs.median_seconds(ours)
        lines.append(f"seed {seed}: a step of TRL takes {ratio:.1f} times as long")
    lines.append(f"on {len(os.sched_getaffinity(0))} cores")
    say("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
