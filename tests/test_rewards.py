"""Reward functions in worker processes (infra/data/reward_pool.py), those that misbehave above all,
and what a run requires of them (infra/data/rewards.py)."""

import contextlib
import functools
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import hostile
import numpy as np
import pytest
from conftest import ROOT, read_jsonl, refused, until
from numpy.testing import assert_allclose, assert_array_equal

import train
from infra.data import reward_pool, rewards
from infra.data.reward_pool import RewardPool

ROW = {"question": "Why?", "answer": "5"}
# This is enough for the other functions, even on a busy machine.
SECONDS = 2
TOO_SLOW = f"TooSlow: no score within {SECONDS} s"


def score(pool, answers, row=ROW, truncated=None):
    return pool.score_answers([row] * len(answers), answers, truncated or [False] * len(answers))


@contextlib.contextmanager
def pool_of(functions, directory, workers=1, seconds=SECONDS):
    with RewardPool(functions, workers, seconds, str(directory / "rewards.log")) as pool:
        yield pool


def test_a_function_that_also_judges_is_called_once(tmp_path):
    def judge(row, answer):
        with open(tmp_path / "calls", "a") as f:
            f.write(answer)
        return float(answer)

    class Judge:
        async def __call__(self, row, answer):
            return 3.0

    with pool_of([judge, judge, Judge()], tmp_path) as pool:
        scores, faults = score(pool, ["1", "2"])
    assert scores.tolist() == [[1, 1, 3], [2, 2, 3]] and not faults
    assert sorted((tmp_path / "calls").read_text()) == ["1", "2"]


# ---------------------------------------------------------------- ways to misbehave
# fmt: off
HANGING = [
    hostile.loops,
    hostile.loops_in_c,
    hostile.backtracks,
    hostile.catches_all,
    hostile.ignores_signals,
    hostile.stops_itself,
    hostile.awaits_too_long,
]
HOSTILE = {  # {function: (why it fails on "bad", or "" if it does not; whether it costs a worker)}
    hostile.crashes: ("its process was ended: Segmentation fault", True),
    hostile.aborts: ("its process was ended: Aborted", True),
    hostile.exits_at_once: ("its process exited with code 3", True),
    hostile.kills_itself: ("its process was ended: Killed", True),
    hostile.kills_its_group: ("its process was ended: Killed", True),
    hostile.exits: ("SystemExit: 0", False),
    hostile.interrupts: ("KeyboardInterrupt: ", False),
    hostile.closes_streams: ("its process exited with code 1", True),
    hostile.closes_stdout: ("its process exited with code 1", True),
    hostile.closes_all: ("its process exited with code 1", True),
    hostile.makes_a_session: ("PermissionError: [Errno 1] Operation not permitted", False),
    hostile.forks_and_returns: ("", False),
    hostile.ends_what_it_forked: ("", False),
    hostile.leaves_a_thread: ("", False),
    hostile.changes_directory: ("", False),
    hostile.empties_the_row: ("", False),
    hostile.prints_much: ("", False),
    hostile.recurses: ("RecursionError: maximum recursion depth exceeded", False),
    hostile.takes_all_memory: ("MemoryError: ", False),
    hostile.gives_nan: ("ValueError: nan is not from -1000000 to 1000000", False),
    hostile.gives_infinity: ("ValueError: inf is not from -1000000 to 1000000", False),
    hostile.overflows: ("ValueError: 1e+308 is not from -1000000 to 1000000", False),
    hostile.gives_text: ("ValueError: could not convert string to float: 'much'", False),
    hostile.gives_nothing: ("TypeError: float() argument must be a string or a real number", False),
    hostile.gives_a_function: ("TypeError: float() argument must be a string or a real", False),
    hostile.is_mute: ("MuteError: it does not say why", False),
    hostile.raises_what_cannot_be_pickled: ("LocalError: <function ", False),
    hostile.divides: ("ZeroDivisionError: division by zero", False),
}
# fmt: on


@pytest.mark.parametrize("function", HOSTILE, ids=lambda function: function.__name__)
def test_a_hostile_reward_costs_its_answer_and_at_most_one_worker(function, tmp_path, capfd):
    """The function scores 0 on one answer, if it fails there. The other answers, the other function
    and this process are as before."""
    fault, costs_a_worker = HOSTILE[function]
    here = os.getcwd(), [signal.getsignal(number) for number in signal.Signals]
    with pool_of([hostile.process, function, hostile.fine], tmp_path) as pool:
        ((before, *_),), _ = score(pool, ["5"])
        scores, faults = score(pool, ["5", "bad", "6"])
        assert_array_equal(scores[:, 1:], [[1, 1], [0 if fault else 1, 1], [1, 1]])
        if fault:
            assert list(faults) == [function.__name__] and list(faults[function.__name__]) == [1]
            assert faults[function.__name__][1].startswith(fault), faults
        else:
            assert faults == {}
        ((after, *_),), _ = score(pool, ["5"])
        assert (after != before) == costs_a_worker
    assert here == (os.getcwd(), [signal.getsignal(number) for number in signal.Signals])
    assert capfd.readouterr() == ("", ""), "what a function prints goes to rewards.log"


def test_a_reward_that_hangs_costs_its_answer(tmp_path):
    """Each function hangs on one answer, all at the same time in workers of their own."""
    with pool_of([*HANGING, hostile.fine], tmp_path, workers=len(HANGING)) as pool:
        scores, faults = score(pool, ["5", "bad", "6"])
    hangs = len(HANGING)
    assert_array_equal(scores, [[1] * hangs + [1], [0] * hangs + [1], [1] * hangs + [1]])
    assert faults == {function.__name__: {1: TOO_SLOW} for function in HANGING}


# ---------------------------------------------------------------- functions that fail
def test_a_reward_that_is_lost_again_and_again_is_not_called_any_more(monkeypatch, tmp_path):
    monkeypatch.setattr(reward_pool, "MAX_LOST", 2)
    answers = ["bad", "5", "bad", "bad", "5"]
    for function, how, seconds in (
        (hostile.loops, "was too slow", 1),
        (hostile.exits_at_once, "ended its process", 5),
    ):
        with pool_of([function, hostile.half], tmp_path, seconds=seconds) as pool:
            scores, faults = score(pool, answers)
        assert_array_equal(scores, [[0, 0.5], [1, 0.5], [0, 0.5], [0, 0.5], [0, 0.5]])
        (faults_of,) = faults.values()
        assert sorted(faults_of) == [0, 2, 3, 4]
        assert not any(faults_of[i].startswith("not called") for i in (0, 2, 3)), faults_of
        assert faults_of[4] == f"not called, as it {how} 2 times in succession"


def test_rewards_are_weighted_sums_without_the_column_of_solved():
    scores = np.array([[9.0, 1, 0], [9, 0, 1], [9, 1, 1]])
    assert [weight for _, weight in train.REWARDS] == [1.0, 0.1]
    assert_allclose(train.rewards_of(scores), [1.0, 0.1, 1.1])


def test_a_reward_that_has_never_worked_ends_the_run(capsys, tmp_path):
    with pool_of([hostile.divides], tmp_path) as pool:
        _, faults = score(pool, ["bad"] * 3)
        assert pool.report(faults) == 3, "so few may be chance"
        several = {"divides": {0: "ValueError: b", 1: "TypeError: a", 2: "ValueError: b"}}
        assert pool.report(several) == 3
        said = capsys.readouterr().out
        assert "ValueError: b; for other reasons on 1, such as: TypeError: a\n" in said
        pool.failed_reports.clear()
        _, faults = score(pool, ["bad"] * 4)
        assert pool.report(faults) == 4, "the function may work for other questions"
        again = [*score(pool, ["bad"] * 4)]
        with pytest.raises(SystemExit):
            pool.report(again[1])
        pool.failed_reports.clear()
        _, faults = score(pool, ["bad"] * 4, dict(ROW))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            pool.report(faults)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert re.fullmatch(
            "train.py: reward divides failed on all 4 answers that were not truncated: "
            r"ZeroDivisionError: division by zero \(hostile.py:\d+\); fix it\n",
            said,
        ), said
        # A function that has worked before may fail for a reason that passes, so the run goes on.
        score(pool, ["5"])
        assert pool.report(faults) == 4
    assert "reward divides failed on 4 answers, and scores 0 there" in capsys.readouterr().out


def test_a_reward_that_works_on_another_host_does_not_end_the_run(tmp_path, monkeypatch):
    """On a pod, all answers of a host may be to one question."""
    with pool_of([hostile.divides], tmp_path) as pool:
        _, faults = score(pool, ["bad"] * 4)
        pool.failed_reports.update(pool.names)
        works = True

        def gather(own):
            return np.array([own, [(works, 0, 0)] * len(own)])

        monkeypatch.setattr(reward_pool, "all_gather_processes", gather)
        assert pool.report(faults) == 4
        works = False
        with pytest.raises(SystemExit):
            pool.report(faults)


def test_a_truncated_answer_scores_0_and_is_not_scored(tmp_path):
    """A function that is SOLVED and one of REWARDS is called once, and its faults count once."""
    with pool_of([hostile.divides, hostile.divides, hostile.fine], tmp_path) as pool:
        truncated = [False, False, True, True]
        scores, faults = score(pool, ["5", "bad", "5", "bad"], truncated=truncated)
    assert_array_equal(scores, [[1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    assert {name: list(failed) for name, failed in faults.items()} == {"divides": [1]}


# ---------------------------------------------------------------- workers
def test_a_task_has_calls_of_one_function():
    """Calls of a lost worker return to the front of the queue, before those of other functions."""
    queue = [(1, 5), (0, 6), (1, 7), (1, 8)]
    scoring = reward_pool.Scoring(["a", "b"], queue, np.zeros((9, 2)))
    assert scoring.take(1) == [(1, 5)]
    assert scoring.take(0.1) == [(0, 6)]
    assert scoring.take(0.6) == [(1, 7), (1, 8)] and scoring.queue == []


def test_answers_are_scored_side_by_side(tmp_path):
    directory = tmp_path / "met"
    directory.mkdir()
    with pool_of([hostile.waits_for_another], tmp_path, workers=2, seconds=60) as pool:
        row = ROW | {"directory": str(directory)}
        scores, faults = score(pool, ["5", "6"], row)
    assert scores.all() and not faults


def test_many_scores_are_exact_and_in_order(tmp_path):
    # A function without a name of its own works, and so does one that cannot be imported.
    functions = [functools.partial(hostile.as_written), lambda row, answer: 0.5]
    numbers = [i / 7 for i in range(1000)]
    for workers in (1, 3):
        with pool_of(functions, tmp_path, workers) as pool:
            scores, faults = score(pool, list(map(str, numbers)))
        assert_array_equal(scores, [[number, 0.5] for number in numbers])
        assert not faults


def test_a_reward_gets_the_columns_of_the_data(tmp_path):
    """Rows also hold token ids, which functions do not get."""
    row = ROW | {"words": 20, "prompt": "Why?", "prompt_ids": [1, 2], "demonstration_ids": [3]}
    with pool_of([hostile.columns], tmp_path) as pool:
        scores, faults = score(pool, ["5"], row)
    assert scores.all() and not faults


def test_an_async_reward_scores_many_answers_at_once(tmp_path):
    with pool_of([hostile.waits_for_eight], tmp_path) as pool:
        scores, faults = score(pool, ["5"] * 8)
    assert scores.all() and not faults
    # A function that waits costs no worker, so its other answers are scored at the same time. A
    # function that blocks its worker costs the answers that have begun there.
    functions = [hostile.awaits_too_long, hostile.process, hostile.blocks]
    with pool_of(functions, tmp_path, seconds=SECONDS) as pool:
        scores, faults = score(pool, ["5", "bad", "6", "bad"])
    assert_array_equal(scores[:, 0], [1, 0, 1, 0])
    assert len({*scores[:, 1]}) == 1
    assert faults["awaits_too_long"] == {1: TOO_SLOW, 3: TOO_SLOW}
    lost = np.flatnonzero(scores[:, 2] == 0).tolist()
    assert sorted(faults["blocks"]) == lost and {1, 3} <= {*lost}
    assert faults["blocks"][1] == TOO_SLOW


def test_the_time_of_an_async_call_begins_with_the_call(monkeypatch, tmp_path):
    """All calls together take longer than one call may take."""
    monkeypatch.setattr(reward_pool, "AT_ONCE", 2)
    with pool_of([hostile.takes_most_of_its_time], tmp_path) as pool:
        scores, faults = score(pool, ["5"] * 6)
    assert scores.all() and not faults


def test_the_time_of_each_call_begins_with_the_call(tmp_path):
    """A worker gets all calls at once. Together, they take longer than one call may take."""

    def rests(row, answer):
        time.sleep(0.5)
        return 1

    with pool_of([rests], tmp_path, seconds=1.5) as pool:
        scores, faults = score(pool, ["5"] * 5)
    assert scores.all() and not faults


def test_a_score_that_came_just_in_time_counts(tmp_path):
    """A worker that is late has reported since the supervisor last looked for reports."""
    worker = object.__new__(reward_pool.Worker)
    worker.channel, end_of_worker = socket.socketpair()
    end_of_worker.sendall(b'[1, "KeyError: 5"]\n\n[2, "cut')
    worker.scores = np.array([0.5, np.nan, np.nan])
    worker.process = mock.Mock(exitcode=None)
    worker.calls = {0: (0, 3), 1: (0, 1)}
    worker.is_closed = False
    worker.unread = b""
    worker.seconds = worker.limit = 60
    worker.last_heard = time.monotonic() - 99
    assert worker.why_late() == "TooSlow: no score within 60 s"
    supervisor = reward_pool.Supervisor(None, [hostile.fine], 1, 60, "", [worker])
    scoring = reward_pool.Scoring(["fine"], [], np.zeros((4, 1)))
    supervisor.read(0, scoring)
    assert scoring.scores[3, 0] == 0.5 and scoring.faults == {"fine": {1: "KeyError: 5"}}
    assert supervisor.workers == [worker] and worker.unread == b'[2, "cut'
    end_of_worker.close()
    worker.channel.close()


def test_a_worker_gets_no_more_calls_than_there_is_room_for(monkeypatch, tmp_path):
    monkeypatch.setattr(reward_pool, "MAX_CALLS", 5)
    with pool_of([hostile.as_written], tmp_path) as pool:
        scores, faults = score(pool, list(map(str, range(23))))
    assert_array_equal(scores[:, 0], range(23))
    assert not faults


def test_what_a_reward_prints_goes_to_a_file_that_stays_small(monkeypatch, tmp_path, capfd):
    log = tmp_path / "rewards.log"
    monkeypatch.setattr(reward_pool, "LOG_BYTES", 1000)
    with pool_of([hostile.speaks], tmp_path) as pool:
        scores, faults = score(pool, ["5"])
        assert scores.all() and not faults
        assert set(log.read_text().splitlines()) == {"said on stdout", "said on stderr \\ud800"}
        score(pool, ["5"] * 1000)
        score(pool, ["5"])
        assert log.stat().st_size < 2000
    assert capfd.readouterr() == ("", "")


def is_running(process):
    """Whether a process runs. One that has ended may wait for its parent to notice."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@needs_linux
def test_what_a_reward_forks_ends_with_its_worker(tmp_path):
    row = ROW | {"file": str(tmp_path / "processes")}
    with pool_of([hostile.forks_and_stays], tmp_path) as pool:
        scores, _ = score(pool, ["5", "bad"], row)
        lost = (tmp_path / "processes").read_text().split()
        assert_array_equal(scores, [[1], [0]])
        assert not any(map(is_running, lost))
        score(pool, ["5"], row)
        left = (tmp_path / "processes").read_text().split()
        assert left != lost and all(map(is_running, left))
    until(lambda: not any(map(is_running, left)), seconds=60)


# A program with a reward function of its own, which hangs on the answer "bad".
PROGRAM = """
import os
import sys

import jax
import jax.numpy as jnp

from infra.data.reward_pool import RewardPool


def uses_jax(row, answer):
    while answer == "bad":
        print(f"worker {os.getpid()} hangs", flush=True)
        sum(range(10**12))
    return jnp.ones(3).sum() / 3 * (jax.default_backend() == os.environ["JAX_PLATFORMS"] == "cpu")


rows = [{"question": "Why?", "answer": "5"}] * 2
with RewardPool([uses_jax], 1, 60, sys.argv[1]) as pool:
    print(*pool.score_answers(rows, ["5", "6"], [False] * 2), flush=True)
    pool.score_answers(rows, ["bad"] * 2, [False] * 2)
"""


@needs_linux
def test_jax_in_a_reward_takes_no_device_and_workers_end_when_the_run_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    log = tmp_path / "rewards.log"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "tpu,cuda,cpu"}
    command = [sys.executable, program, log]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE) as process:
        until(lambda: log.exists() and "hangs" in log.read_text(), [process], seconds=300)
        (worker,) = re.findall(r"worker (\d+) hangs", log.read_text())
        supervisor = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
        assert is_running(worker) and is_running(supervisor)
        process.kill()
        assert process.stdout.read() == "[[1.]\n [1.]] {}\n"
    until(lambda: not is_running(worker) and not is_running(supervisor), seconds=60)


def process_of(pool):
    """The number of the pool's only worker."""
    ((process, *_),), _ = score(pool, ["5"])
    return round(process * 2**10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_for_the_run_do_not_end_its_workers(number, tmp_path):
    """Slurm signals all processes of a task. The run then ends its workers itself."""
    with pool_of([hostile.process], tmp_path) as pool:
        worker = process_of(pool)
        os.kill(worker, number)
        os.kill(pool.process.pid, number)
        assert process_of(pool) == worker
        # Ctrl-C in a terminal signals the processes of one session.
        assert os.getsid(0) not in (os.getsid(worker), os.getsid(pool.process.pid))


@needs_linux
def test_a_worker_that_ended_between_steps_is_replaced(tmp_path):
    with pool_of([hostile.process], tmp_path) as pool:
        worker = process_of(pool)
        os.kill(worker, signal.SIGKILL)
        until(lambda: not is_running(worker), seconds=60)
        scores, faults = score(pool, ["5"])
        assert scores.all() and not faults and process_of(pool) != worker


def test_a_run_whose_supervisor_was_killed_says_so(tmp_path):
    with pool_of([hostile.fine], tmp_path) as pool:
        score(pool, ["5"])
        pool.process.kill()
        with pytest.raises(OSError, match="the process that starts reward workers has ended"):
            score(pool, ["5"])


def test_a_pool_has_half_the_cores(monkeypatch):
    for cores, workers in {1: 1, 2: 1, 4: 2, 64: 8}.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: {*range(n)}, raising=False)
        assert reward_pool.default_workers() == workers


def test_a_reward_of_which_a_part_failed_is_not_known():
    """Held-out questions may lack a column that a function of REWARDS needs."""
    scores = np.array([[1.0, 1, 1], [1, 1, 0], [0, 0, 1]])
    found = train.rewards_or_nan(scores, {"formatted": {1: "KeyError"}, "other": {2: "slow"}})
    assert_array_equal(found, [1.1, np.nan, 0.1])


# ---------------------------------------------------------------- functions that are refused
def test_a_reward_that_takes_other_arguments_is_refused_before_the_run(monkeypatch, tmp_path):
    refusals = {
        hostile.three_arguments: "(question, reference, answer)",
        hostile.one_argument: "(answer)",
    }
    for function, takes in refusals.items():
        name = function.__name__
        monkeypatch.setattr(train, "REWARDS", [(train.correct, 1.0), (function, 1.0)])
        assert refused("--out", tmp_path / "run") == (
            f"train.py: reward {name} takes {takes}, but must take (row, answer); row has every "
            "column of the data, such as row['question'] and row['answer']"
        )
    assert not (tmp_path / "run").exists()
    # Further arguments may have defaults. A function in C may not state its arguments.
    rewards.check_functions(min, [(hostile.with_bonus, np.float32(1)), [min, 0]])
    wrong = {"correct": train.correct, "(5, 1.0)": (5, 1.0), "'correct'": "correct"}
    for shown, entry in wrong.items():
        monkeypatch.setattr(train, "REWARDS", [(train.correct, 1.0), entry])
        text = f"train.py: REWARDS holds {shown}, not (function, weight) such as (correct, 1.0)"
        assert refused("--out", tmp_path / "run") == text
    # reward/mean, reward/std and reward/faults are metrics already.
    monkeypatch.setattr(train, "REWARDS", [(train.correct, 1.0), (np.mean, 1.0), (np.std, 1.0)])
    text = "REWARDS holds a function named mean, std, but reward/mean, reward/std is a metric"
    assert text in refused("--out", tmp_path / "run")
    monkeypatch.setattr(
        train, "REWARDS", [(functools.partial(max), 1.0), (functools.partial(min), 1.0)]
    )
    text = refused("--out", tmp_path / "run")
    assert text.startswith("train.py: REWARDS holds several functions named partial, but")
    monkeypatch.setattr(train, "REWARDS", [(functools.partial(max), 1.0)])
    monkeypatch.setattr(train, "SOLVED", functools.partial(min))
    text = refused("--out", tmp_path / "run")
    assert "SOLVED and another function, in REWARDS, are both named partial" in text


def test_no_reward_has_the_name_of_the_count_of_faults(capsys):
    def faults(row, answer):
        return 0.0

    with pytest.raises(SystemExit):
        rewards.check_functions(train.correct, [(faults, 1.0)])
    assert "named faults, but reward/faults is a metric of all functions" in capsys.readouterr().err


def test_solved_is_one_named_function(monkeypatch, tmp_path, train_here):
    """The metric `solved` and evaluations use SOLVED, whatever REWARDS contains."""
    monkeypatch.setattr(train, "REWARDS", [(hostile.fine, 1.0)])
    monkeypatch.setattr(train, "SOLVED", hostile.half)
    flags = "--steps 1 --sft_steps 8 --batch 2 --npq 4 --minibatches 1 --eval_n 64"
    # Greedy answers of such a weak model never end, so evaluate with temperature 1.
    flags += " --eval_temperature 1"
    train_here(flags, "--out run")
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    solved = [row["eval/solved"] for row in rows if "eval/solved" in row]
    # A truncated answer is not solved. In each evaluation some answers end.
    assert len(solved) == 2 and 0 < min(solved) <= max(solved) <= 0.5, rows
    assert sum("solved" in row for row in rows) == 1, rows
    for answer in read_jsonl(tmp_path / "run/evals.jsonl"):
        assert answer["solved"] == (0 if answer["truncated"] else 0.5), answer
    for row in rows:
        if "solved" in row:
            assert row["solved"] == pytest.approx(0.5 * (1 - row["truncated"])), row


# ---------------------------------------------------------------- math-verify
def test_math_verify_compares_formulas_within_the_time_limit(monkeypatch, tmp_path):
    """README's reward function works with math-verify's own time limits, whose alarm replaces any
    other alarm. A function that hangs after it is ended all the same."""
    pytest.importorskip("math_verify")
    text = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"((?:^    .*\n)*^    .*math_verify.*\n(?:(?:    .*)?\n)*)", text, re.M)
    hanging = """
def same_and_slow(row, answer):
    score = same(row, answer)
    while answer == "hang":
        pass
    return score
"""
    (tmp_path / "formulas.py").write_text(textwrap.dedent(lines) + hanging)
    monkeypatch.syspath_prepend(tmp_path)
    formulas = importlib.import_module("formulas")
    # The lines of README go into train.py.
    new = {name for name in vars(formulas) if not name.startswith("__")}
    assert not new & vars(train).keys(), "README's names replace names of train.py"
    row = {"question": "q", "answer": r"10 - 2\sqrt{5}"}
    texts = [r"so \boxed{-2\sqrt5 + 10}", r"\boxed{3+\sqrt{5}}", "hang", "no", "5"]
    with pool_of([formulas.same_and_slow], tmp_path, seconds=4) as pool:
        scores, faults = score(pool, texts, row)
    assert_array_equal(scores, [[1], [0], [0], [0], [0]])
    assert faults == {"same_and_slow": {2: "TooSlow: no score within 4 s"}}
