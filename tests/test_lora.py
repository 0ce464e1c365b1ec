"""LoRA: adapters against PEFT and against merged matrices, in the update, the rollout and files."""

import dataclasses
import json
import math
import re
import shutil
import zlib
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    QWEN3,
    SMALL,
    UNTIED,
    arguments,
    check_errors,
    edit,
    lives,
    load,
    place,
    read_jsonl,
    refused,
    textbook_hidden,
)
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file
from test_model import hf_logits, hf_model, logit_error
from test_resume import check_kills
from test_update import PLAIN, label, packed_batch, update_case, with_policies

import model
import train
from infra.data import hf
from infra.host.files import CheckpointError
from infra.rollout import layouts
from infra.rollout.engine import Engine
from infra.rollout.sampling import Sampling
from infra.update import lora
from infra.update.fit import device_bytes, estimate_by_sizes
from infra.update.packing import RowShape
from infra.update.state import (
    abstract_gradients,
    abstract_rows,
    abstract_state,
    initial_state,
    weights_of,
    without_base,
)
from test_kernel import mesh, relative
from tools import abstract_rollout
from tools.sizes import model_of_size

RANK = 4
# With these sizes, no product of activations has as many values as a matrix.
WIDE = dataclasses.replace(UNTIED, V=331, D=40, F=56, N=6, K=3, H=14, L=2)
# The scale is 6 / 4.
LORA = PLAIN | dict(lora=RANK, lora_alpha=6)


@cache
def adapters_of(model_cfg, seed=7):
    """Random adapters, neither of them 0: {flat name: array}."""
    rng = np.random.default_rng(seed)
    shapes = lora.adapter_shapes(model_cfg, RANK)
    return {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def base_of(saved):
    """The base of a model of transformers, as lora.base_of describes it."""
    return {"model": str(saved.directory), "files": {}}


def lora_state(cfg, model_cfg, on, base, adapters):
    """A state before an update. base: flat NumPy weights."""
    opt = {name: train.optimizer(cfg, name).init(a) for name, a in adapters.items()}
    arrays = {"params": place(adapters, on), "opt": opt, "base": place(base, on)}
    plain = dataclasses.replace(cfg, beta=0.0)
    wanted = abstract_state(plain, model_cfg, on, train.optimizer)
    assert jax.tree.structure(arrays) == jax.tree.structure(wanted)
    return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), arrays, wanted)


def merged(weights, adapters, scale, model_cfg=SMALL):
    """The weights W + scale A B, by NumPy."""
    new = dict(weights)
    for name in lora.adapted_matrices(model_cfg):
        a, b = (adapters[part] for part in model.adapter_names(name))
        shape = weights[name].shape
        rank = a.shape[-1]
        ab = a.reshape(len(a), -1, rank) @ b.reshape(len(b), rank, -1)
        new[name] = weights[name] + np.float32(scale) * ab.reshape(shape)
    return new


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# ---------------------------------------------------------------- against PEFT
def peft_model(base, adapter):
    """PEFT's model of a directory's adapter, on the transformers model in the directory `base`."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(theirs, adapter, is_trainable=True)


def peft_update(theirs, optimizer, sequences, advantages):
    """One update of PEFT's adapters, by the textbook: the mean over all answer tokens of -advantage
    times the logprob."""
    torch = pytest.importorskip("torch")
    total = 0
    for (prompt, answer), advantage in zip(sequences, advantages, strict=True):
        logits = theirs(torch.tensor([prompt + answer])).logits[0]
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        taken = logp.gather(1, torch.tensor(answer)[:, None])
        total = total - float(advantage) * taken.sum()
    (total / sum(len(answer) for _, answer in sequences)).backward()
    optimizer(theirs.parameters()).step()


def torch_optimizers():
    torch = pytest.importorskip("torch")
    return {
        "sgd": partial(torch.optim.SGD, lr=0.5),
        "adamw": partial(torch.optim.AdamW, lr=2e-4, betas=(0.9, 0.99), weight_decay=0.1),
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_update_equals_peft(optimizer, tmp_path, record_property):
    """One update of the adapters of a Qwen2 equals PEFT's. PEFT starts from the file that we write,
    and we read its result from the file that PEFT writes."""
    pytest.importorskip("peft")
    saved = hf_model("tied")
    rates = {"sgd": 0.5, "adamw": 2e-4}
    flags = LORA | dict(optimizer=optimizer, weight_decay=0.1 if optimizer == "adamw" else 0.0)
    cfg = train.Config(**flags, adapter=str(tmp_path / "after"))
    adapters = adapters_of(saved.cfg)
    base = jax.device_get(model.flatten(saved.params))
    state = lora_state(cfg, saved.cfg, mesh(), base, adapters)
    weights = weights_of(state)
    lora.write(str(tmp_path / "before"), weights, cfg, saved.cfg, mesh(), base_of(saved))

    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 9, (6, 2))
    sequences = [[rng.integers(0, saved.cfg.V, n).tolist() for n in pair] for pair in lengths]
    advantages = rng.standard_normal(6)
    prompts, answers = zip(*sequences, strict=True)
    alone = {i: [i] for i in range(6)}
    rows = train.make_rows(alone, prompts, answers, advantages, (6, 16), cfg)
    rows["weight"] /= np.float32(lengths[:, 1].sum())
    static = dict(cfg=cfg, model_cfg=saved.cfg, mesh=mesh())
    state, _, _ = train.update(state, [rows], rates[optimizer], **static)

    theirs = peft_model(saved.directory, tmp_path / "before")
    peft_update(theirs, torch_optimizers()[optimizer], sequences, advantages)
    theirs.save_pretrained(tmp_path / "after")
    wanted = lora.read(cfg, saved.cfg)
    got = jax.device_get(model.flatten(state["params"]))
    assert got.keys() == wanted.keys()
    moved = {name: np.abs(wanted[name] - adapters[name]).max() for name in wanted}
    assert min(moved.values()) > 1e-4, moved
    errors = {name: np.abs(got[name] - wanted[name]) for name in wanted}
    check_errors(errors, 1e-5, record_property)
    # AdamW's first step is the learning rate times the gradient's sign, so rounding matters where a
    # gradient is almost 0. All other values are much closer than that.
    usual = {name: np.quantile(error, 0.99) / moved[name] for name, error in errors.items()}
    check_errors(usual, 1e-3, record_property, "largest error of 99%, as part of the step")


@pytest.mark.parametrize("name", ["tied", slow("qwen3")])
def test_final_is_what_peft_makes_of_its_adapter(name, tmp_path, record_property):
    """PEFT, with the adapter beside the final model, has the logits of the final model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    saved = hf_model(name)
    cfg = train.Config(**LORA)
    on = mesh(1, 2, 2) if len(jax.devices()) >= 8 else mesh()
    params, _ = load(saved.directory, on)
    adapters = place(adapters_of(saved.cfg), on)
    params["layers"] |= adapters["layers"]
    final = str(tmp_path), saved.directory, params, saved.cfg, on, {}

    def write_adapter(directory):
        lora.write(f"{directory}/adapter", params, cfg, saved.cfg, on, base_of(saved))

    hf.write_final(*final, cfg.lora_scale, write_adapter)
    tokens = np.random.default_rng(0).integers(0, saved.cfg.V, (4, 21)).tolist()
    final = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    wanted = hf_logits(final, tokens)
    found = hf_logits(peft_model(saved.directory, tmp_path / "final/adapter"), tokens)
    base = hf_logits(saved.theirs, tokens)
    assert np.abs(found - base).max() > 0.1, "the adapter changes nothing"
    errors = {"logits": logit_error(found, wanted)}
    check_errors(errors, 1e-5, record_property)


# ---------------------------------------------------------------- the gradient
def gradient_of(dims, micro_batch, width, **flags):
    """The gradient of the adapters of SMALL in a minibatch of packed rows, and the loss."""
    on = mesh(*dims)
    cfg = train.Config(**LORA | flags)
    case = update_case()
    before = lora_state(cfg, SMALL, on, case.weights, adapters_of(SMALL))
    batch = [with_policies(rows) for rows in packed_batch(cfg, on, micro_batch, width)]
    static = dict(cfg=cfg, model_cfg=SMALL, mesh=on)
    old_base = jax.device_get(before["base"])
    after, parts, _ = train.update(before, batch, 1e4, **static)
    jax.tree.map(assert_array_equal, jax.device_get(after["base"]), old_base)
    new = jax.device_get(model.flatten(after["params"]))
    old = adapters_of(SMALL)
    loss = sum(float(part["loss"]) for part in parts)
    return {name: (old[name] - a) / 1e4 for name, a in new.items()}, loss


one_device = cache(partial(gradient_of, (1, 1, 1), 20, 48))

# fmt: off
SPLITS = [  # (mesh, rows per device in a micro-batch, tokens of a row, flags)
    ((2, 2, 2), 3, 16, {"remat": "none"}),
    slow((1, 8, 1), 2, 16, {}),
    slow((1, 4, 2), 2, 24, {"remat": "dots"}),
    slow((1, 1, 1), 3, 24, {"remat": "dots"}),
]
# fmt: on


@pytest.mark.parametrize("dims, micro_batch, width, flags", SPLITS, ids=label)
def test_gradient_is_the_same_for_any_split(dims, micro_batch, width, flags, record_property):
    """The gradient is that of one device with all rows in one micro-batch: on any mesh, for any
    packing and micro-batch, and for any --remat."""
    wanted, wanted_loss = one_device()
    got, loss = gradient_of(dims, micro_batch, width, **flags)
    assert_allclose(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    errors = {name: np.abs(got[name] - wanted[name]).max() for name in wanted}
    check_errors(errors, 1e-6, record_property)
    # The largest gradient is about 0.03. In float32, sums in another order differ by a few 1e-6.
    errors = {name: relative(got[name], wanted[name]) for name in wanted}
    check_errors(errors, 1e-5, record_property, "largest relative error")


def test_gradient_is_that_of_the_merged_matrices(record_property):
    """The gradients of A and B follow from the gradient of W + scale A B, which JAX computes for a
    plain loop over layers."""
    cfg = train.Config(**LORA)
    case = update_case()
    adapters = adapters_of(SMALL)
    alone = {i: [i] for i in range(16)}
    rows = train.make_rows(alone, case.prompts, case.answers, case.advantages, (16, 16), cfg)
    rows["weight"] /= np.float32(rows["weight"].sum())
    before = lora_state(cfg, SMALL, mesh(), case.weights, adapters)
    static = dict(cfg=cfg, model_cfg=SMALL, mesh=mesh())
    got, _ = train.gradients(weights_of(before), rows, **static)

    @jax.jit
    @jax.grad
    def gradient(params):
        fields = (rows[name] for name in ("tokens", "positions", "segments"))
        hidden = textbook_hidden(params, SMALL, *fields)
        logp = jax.nn.log_softmax(hidden @ model.head(params).T)
        taken = jnp.take_along_axis(logp, rows["targets"][..., None], -1)[..., 0]
        return -(rows["weight"] * rows["advantage"] * taken).sum()

    d_weights = model.flatten(gradient(model.nest(merged(case.weights, adapters, 1.5))))
    errors = {}
    for name in lora.adapted_matrices(SMALL):
        name_a, name_b = model.adapter_names(name)
        L = SMALL.L
        a = adapters[name_a].reshape(L, -1, RANK)
        b = adapters[name_b].reshape(L, RANK, -1)
        d_w = np.reshape(d_weights[name], (L, a.shape[1], b.shape[2]))
        d_a = 1.5 * d_w @ b.swapaxes(1, 2)
        d_b = 1.5 * a.swapaxes(1, 2) @ d_w
        flat = model.flatten(got)
        errors[name_a] = relative(flat[name_a].reshape(d_a.shape), d_a)
        errors[name_b] = relative(flat[name_b].reshape(d_b.shape), d_b)
    assert flat.keys() == errors.keys()
    check_errors(errors, 1e-5, record_property)


# ---------------------------------------------------------------- the compiled program
def sizes_of_results(text, operation):
    """The number of values in each result of an operation in a compiled program."""
    # Such as `%dot.1 = f32[16,64]{1,0} dot(` or `%r = (f32[16]{0}, f32[8]{0}) reduce-scatter(`.
    sizes = set()
    for results in re.findall(rf"= (.*?) {operation}\(", text):
        for dims in re.findall(r"[a-z]+\d+\[([\d,]*)\]", results):
            sizes.add(math.prod(int(n) for n in dims.split(",") if n))
    return sizes


@cache
def sizes_in_gradient_program(**flags):
    """(sizes of products, sizes of what is summed over devices) in the compiled gradient."""
    cfg = train.Config(**PLAIN | flags)
    on = mesh(1, 8, 1)
    wanted = abstract_state(cfg, WIDE, on, train.optimizer)
    rows = abstract_rows(train.token_fields(cfg, True), 2, 24, on)
    static = dict(cfg=cfg, model_cfg=WIDE, mesh=on)
    text = train.gradients.lower(weights_of(wanted), rows, **static).compile().as_text()
    summed = sizes_of_results(text, "reduce-scatter") | sizes_of_results(text, "all-reduce")
    return sizes_of_results(text, "dot"), summed


def test_no_gradient_of_a_frozen_weight_is_formed_or_reduced():
    """The compiled gradient has no product of the size of a matrix, of the embedding or of the LM
    head, and sums none over devices. With all weights trained, it has them all."""
    shapes = model.shapes(WIDE)
    # On one of eight devices: gradients of layers are gathered, those of the head are sharded.
    matrices = {math.prod(shapes[name][1:]) for name in lora.adapted_matrices(WIDE)}
    head = -(-WIDE.V // 8) * WIDE.D
    products, summed = sizes_in_gradient_program()
    assert products >= matrices | {head}
    # Before a reduce-scatter, or after it.
    assert all(size in summed or size // 8 in summed for size in matrices)
    products, summed = sizes_in_gradient_program(lora=RANK)
    # A joined matrix is longer along D.
    frozen = matrices | {head} | {size // WIDE.D * (WIDE.D + RANK) for size in matrices}
    assert not products & frozen, products
    assert not summed & {size // n for size in frozen for n in (1, 8)}, summed


def test_state_holds_masters_and_moments_of_adapters_alone():
    cfg = train.Config(**LORA | dict(optimizer="adamw", beta=0.1, dtype="bfloat16"))
    state = abstract_state(cfg, UNTIED, mesh(1, 8, 1), train.optimizer)
    names = lora.adapter_shapes(UNTIED, RANK).keys()
    assert len(names) == 14
    for part in "params", "ref":
        assert model.flatten(state[part]).keys() == names
    assert state["opt"].keys() == names
    kinds = {part: {a.dtype.name for a in jax.tree.leaves(state[part])} for part in state}
    assert kinds == {
        "params": {"float32"},
        "opt": {"float32", "int32"},
        "ref": {"bfloat16"},
        "base": {"bfloat16"},
    }
    base = state["base"]
    assert model.flatten(base).keys() == model.shapes(UNTIED).keys()
    head = base["head_VD"]
    assert head.sharding.shard_shape(head.shape) == (UNTIED.V, UNTIED.D // 8)
    # What is saved does not have the base.
    assert without_base(state).keys() == {"params", "opt", "ref"}


# ---------------------------------------------------------------- the rollout
def rollout_weights(kind, dtype, quantised, adapters, tp=2):
    """Returns (layout, weights of a rollout with adapters, those of the model W + scale A B)."""
    cfg = train.Config(**LORA)
    on = mesh(2, 2, 2)
    weights = update_case().weights
    state = lora_state(cfg, SMALL, on, weights, adapters)
    layout = layouts.layout_of(kind, tp if kind == "tp" else 1, SMALL, on)
    got = layouts.to_rollout(weights_of(state), layout, dtype, quantised, cfg.lora_scale)
    plain = place(merged(weights, adapters, cfg.lora_scale), on)
    return layout, got, layouts.to_rollout(plain, layout, dtype, quantised)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_plan_compiles_a_rollout_with_adapters(quantised):
    """The abstract weights that a plan compiles for have the shapes and shardings of a rollout."""
    layout, got, _ = rollout_weights("tp", "bfloat16", quantised, adapters_of(SMALL))
    dtype = jnp.dtype("bfloat16")
    abstract = abstract_rollout.abstract_weights(SMALL, layout, dtype, quantised, RANK)
    got = model.flatten(got)
    abstract = model.flatten(abstract)
    assert got.keys() == abstract.keys()
    for name, a in got.items():
        planned = abstract[name]
        assert a.shape == planned.shape
        assert a.dtype == planned.dtype
        assert a.sharding.is_equivalent_to(planned.sharding, a.ndim)


def test_an_int8_rollout_gets_the_merged_weights():
    _, got, wanted = rollout_weights("fsdp", "float32", True, adapters_of(SMALL))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    got, wanted = model.flatten(got), model.flatten(wanted)
    for name, a in wanted.items():
        assert got[name].sharding == a.sharding
        # A value that is halfway between two int8 may be rounded either way.
        atol = 1 if a.dtype == jnp.int8 else 1e-6
        assert_allclose(got[name], a, atol=atol, rtol=1e-6, err_msg=name)
        assert (np.asarray(got[name]) == np.asarray(a)).mean() > 0.5


# SMALL has 2 key/value heads and 4 query heads.
@pytest.mark.parametrize("kind, tp", [("tp", 2), ("tp", 4), ("tp", 8), ("fsdp", 1), ("maxtext", 1)])
def test_a_rollout_with_adapters_samples_from_the_merged_model(kind, tp, record_property):
    layout, *both = rollout_weights(kind, "float32", False, adapters_of(SMALL), tp)
    prompts = np.random.default_rng(3).integers(1, SMALL.V, (8, 5)).tolist()
    outs = []
    for weights in both:
        sampler = Engine(SMALL, None, layout, "float32", "float32", 6, weights=weights)
        outs.append(sampler.generate(prompts, jax.random.key(5), Sampling()))
    got, wanted = outs
    assert_array_equal(got["tokens_BT"], wanted["tokens_BT"])
    difference = got["logprobs_BT"] - wanted["logprobs_BT"]
    error = np.abs(difference).max()
    record_property("largest error", f"{error:.1e}")
    assert 0 < error < 1e-5


def separate(w):
    """Undo model.join."""
    if not w.is_joined:
        return w
    # The joined matrix holds the scale, in B or in A.
    if w.sums_over_D:
        parts = dict(w=w.w[:-RANK], b=w.w[-RANK:])
    else:
        parts = dict(w=w.w[..., :-RANK], a=w.w[..., -RANK:])
    return dataclasses.replace(w, **parts, scale=1.0, is_joined=False)


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
def test_a_bfloat16_rollout_does_not_round_small_adapters_away(kind):
    """Here, A B is much smaller than the distance of two bfloat16 near W."""
    adapters = {name: 0.03 * a for name, a in adapters_of(SMALL).items()}
    _, got, rounded = rollout_weights(kind, "bfloat16", False, adapters)
    zeros = {name: np.zeros_like(w) for name, w in update_case().weights.items()}
    products = merged(zeros, adapters, 1.5)
    for name in lora.adapted_matrices(SMALL):
        short = name.removeprefix("layers/")
        stack = got["layers"][0]
        w = jax.tree.map(lambda a: np.asarray(a[1]), stack[short])
        assert w.is_joined == (kind == "tp")
        assert w.w.dtype == w.a.dtype == w.b.dtype == jnp.bfloat16
        w = separate(w)
        product = model.merge(w) - w.w.astype(np.float32)
        assert relative(product, products[name][1]) < 0.02
        # If the sum is rounded to bfloat16, most of it is W again.
        stack = rounded["layers"][0]
        of_sum = np.asarray(stack[short][1])
        is_base = of_sum == w.w
        assert is_base.mean() > 0.5


def test_weights_are_the_base_with_the_adapters_of_policy_or_reference():
    state = {
        "base": {"norm_D": 1, "layers": {"wq_LDNH": 2}},
        "params": {"layers": {"wq_a_LDR": 3}},
        "ref": {"layers": {"wq_a_LDR": 4}},
    }
    assert weights_of(state) == {"norm_D": 1, "layers": {"wq_LDNH": 2, "wq_a_LDR": 3}}
    assert weights_of(state, "ref") == {"norm_D": 1, "layers": {"wq_LDNH": 2, "wq_a_LDR": 4}}
    assert weights_of({"params": {"norm_D": 1}}) == {"norm_D": 1}


def test_new_adapters_change_nothing_and_depend_on_the_seed():
    first = lora.random_adapters(QWEN3, 16, seed=1)
    for name, a in first.items():
        if "_a_" in name:
            inputs = math.prod(a.shape[1:-1])
            assert_allclose(a.std(), inputs**-0.5, rtol=0.1, err_msg=name)
        else:
            assert (a == 0).all(), name
    again = lora.random_adapters(QWEN3, 16, seed=1)
    jax.tree.map(assert_array_equal, first, again)
    other = lora.random_adapters(QWEN3, 16, seed=2)
    assert (first["layers/wq_a_LDR"] != other["layers/wq_a_LDR"]).all()


# ---------------------------------------------------------------- files
def test_another_base_is_found_by_its_checksums():
    was = {"model": "a", "files": {"1.safetensors": "00", "2.safetensors": "11"}}
    assert lora.difference(was, was | {"model": "moved/a"}) == ""
    other = {"model": "b", "files": was["files"] | {"2.safetensors": "22"}}
    message = lora.difference(was, other)
    wanted = "belong to a, whose 2.safetensors had the checksum 11; in b it is 22"
    use = "use the files that the adapters were trained on"
    assert message.endswith(f"{wanted}; {use}"), message
    fewer = {"model": "b", "files": {"1.safetensors": "00"}}
    assert lora.difference(was, fewer).endswith(f"in b it is missing; {use}")
    assert lora.difference({}, was) == "its checkpoint comes from a run without --lora; drop --lora"


def test_a_checksum_covers_all_pieces_of_a_large_file(tmp_path):
    data = b"first piece" + bytes(1 << 24) + b"last piece"
    (tmp_path / "1.safetensors").write_bytes(data)
    assert lora.checksum(str(tmp_path / "1.safetensors")) == zlib.crc32(data)


BASE = {"model": "some/base", "files": {"1.safetensors": "00"}}


def test_peft_files_keep_every_number(tmp_path):
    on = mesh(1, 4, 2)
    cfg = train.Config(**LORA, adapter=str(tmp_path / "adapter"))
    adapters = adapters_of(SMALL)
    lora.write(cfg.adapter, place(adapters, on), cfg, SMALL, on, BASE)
    about = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == "some/base"
    assert (about["r"], about["lora_alpha"]) == (RANK, 6)
    jax.tree.map(assert_array_equal, lora.read(cfg, SMALL), adapters)


# fmt: off
CONFIG_MISTAKES = {  # {change of adapter_config.json: what the message must say}
    "r": (9, "lora = 4, but {} has r = 9; try --lora 9"),
    "lora_alpha": (22.6, "{} has lora_alpha = 22.6; only integers are supported"),
    "use_dora": (True, "use_dora = True; only False is supported"),
    "use_rslora": (True, "use_rslora = True; only False is supported"),
    "modules_to_save": (["lm_head"], "modules_to_save = ['lm_head']; only []"),
    "rank_pattern": ({"q_proj": 2}, "rank_pattern = {{'q_proj': 2}}; only {{}}"),
    "peft_type": ("IA3", "peft_type = 'IA3'; only 'LORA' is supported"),
    "alora_invocation_tokens": ([5], "alora_invocation_tokens = [5]; only [] is supported"),
    "init_lora_weights": ("pissa_niter_4", "'pissa_niter_4', which changes the base; save the"),
}
FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSOR_MISTAKES = [  # (change of adapter_model.safetensors, what the message must say)
    ({FIRST_A: None}, f"{FIRST_A} must have shape (4, 16), and no NaN"),
    ({FIRST_A: np.zeros((4, 15), np.float32)}, "its shape is (4, 15)"),
    ({FIRST_A: np.full((4, 16), np.nan, np.float32)}, "no NaN or infinity"),
    ({"lm_head.weight": np.zeros(1, np.float32)}, "lm_head.weight, which is not an adapter"),
    (b"no tensors", "is not a safetensors file"),
    (None, "is not a safetensors file"),
]
# fmt: on


def test_adapters_that_do_not_fit_are_refused(tmp_path, capsys):
    cfg = train.Config(**LORA, adapter=str(tmp_path / "adapter"))
    lora.write(cfg.adapter, place(adapters_of(SMALL), mesh()), cfg, SMALL, mesh(), BASE)
    config = tmp_path / "adapter/adapter_config.json"
    tensors = tmp_path / "adapter/adapter_model.safetensors"
    good = config.read_bytes(), tensors.read_bytes()
    for name, (value, words) in CONFIG_MISTAKES.items():
        edit(config, {name: value})
        with pytest.raises((SystemExit, CheckpointError)) as error:
            lora.read(cfg, SMALL)
        message = f"{error.value}{capsys.readouterr().err}"
        assert words.format(config) in message, message
        config.write_bytes(good[0])
    for change, words in TENSOR_MISTAKES:
        edit(tensors, change)
        with pytest.raises(CheckpointError) as error:
            lora.read(cfg, SMALL)
        assert words in str(error.value), error.value
        tensors.write_bytes(good[1])


def test_adapters_of_another_base_are_refused(tmp_path, capsys):
    cfg = train.Config(**LORA, model="other", adapter=str(tmp_path / "adapter"))
    lora.write(cfg.adapter, place(adapters_of(SMALL), mesh()), cfg, SMALL, mesh(), BASE)
    lora.check_base(cfg, BASE | {"model": "moved/base"})
    assert not capsys.readouterr().err
    # The merged model of a run is the usual mistake.
    merged_model = {"model": "other", "files": {"1.safetensors": "11"}}
    with pytest.raises(SystemExit):
        lora.check_base(cfg, merged_model)
    message = capsys.readouterr().err
    assert "adapter cannot be used: the adapters belong to some/base" in message, message
    # PEFT names the base, and does not describe it.
    (tmp_path / "adapter/base.json").unlink()
    lora.check_base(cfg, merged_model)
    assert "were trained on some/base; they are useful only if" in capsys.readouterr().err


# ---------------------------------------------------------------- the command line
# fmt: off
MISTAKES = {  # {flags: what the message must say}
    "--lora 8 --offload optimizer": "offload = optimizer has no effect with lora = 8",
    "--lora_alpha 16": "lora_alpha = 16 has no effect with lora = 0; add --lora 16",
    "--adapter here": "adapter = here needs --lora with its rank",
    "--adapter nowhere": "nowhere has no adapter_config.json; a run's adapters are in OUT/final/ad",
    "--lora 8 --adapter nowhere": "nowhere/adapter_config.json is missing",
    "--lora -1": "lora = -1 is out of range",
    "--lora 129": "lora = 129 is more than the hidden size 128",
}
# fmt: on


def test_mistakes_are_refused_with_what_to_try(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/adapter_config.json").write_text("{}")
    for flags, words in MISTAKES.items():
        message = refused("--out run", flags)
        assert words in message, f"{flags}: {message!r} does not say {words!r}"


def test_a_rank_may_be_the_hidden_size():
    lora.check_rank(train.Config(lora=SMALL.D), SMALL)


def test_learning_rates_are_ten_times_as_high_by_default():
    full = train.parse([])
    cfg = train.parse(["--lora", "8"])
    # The supervised steps of the tiny model already have a high rate.
    assert (cfg.lr, cfg.sft_lr) == (10 * full.lr, full.sft_lr)
    cfg = train.parse(["--model", "x", "--lora", "8", "--lr", "0.5"])
    assert (cfg.lr, cfg.sft_lr) == (0.5, 1e-4)
    assert train.parse(["--model", "x", "--lora", "8"]).lr == 1e-5


def test_adapters_name_their_rank(tmp_path):
    cfg = train.Config(**LORA, model="other")
    lora.write(str(tmp_path / "a"), place(adapters_of(SMALL), mesh()), cfg, SMALL, mesh(), BASE)
    found = train.parse(["--adapter", str(tmp_path / "a")])
    assert (found.lora, found.lora_alpha) == (cfg.lora, cfg.lora_alpha)
    assert found.lr == train.parse(["--lora", "8"]).lr


# ---------------------------------------------------------------- what fits
def test_memory_of_the_state_is_that_of_the_base_in_bfloat16():
    """The state and gradients of 7B with adapters of rank 16 take 15 GiB of a device. With all
    weights trained, they take 16 bytes a parameter: 113 GiB."""
    seven = model_of_size("7B")
    held_gib = {}
    for rank in 0, 16:
        cfg = train.Config(lora=rank, dtype="bfloat16")
        state = abstract_state(cfg, seven, mesh(), train.optimizer)
        grads = abstract_gradients(cfg, seven, mesh(), train.optimizer)
        held_gib[rank] = device_bytes((state, grads)) / 2**30
    assert 113 < held_gib[0] < 114
    assert 14.5 < held_gib[16] < 15.0
    # The search for a micro-batch starts from an estimate without a gradient of the embedding.
    rest_gib = estimate_by_sizes(
        cfg, seven, mesh(), RowShape(2048, 64), train.UPDATE, 56.4
    ).rest_gib
    assert rest_gib == pytest.approx(held_gib[16] + 2 * seven.V * seven.D / 2**30)


def test_flops_leave_out_the_gradients_of_frozen_weights():
    assert lora.flops_of_a_token(train.Config(), SMALL) == 0
    adapters = sum(a.size for a in adapters_of(SMALL).values())
    cfg = train.Config(lora=RANK)
    assert lora.flops_of_a_token(cfg, SMALL) == 6 * adapters - 2 * SMALL.n_multiplied


# ---------------------------------------------------------------- runs
# One update per step. The entropy bonus moves the weights even if all answers score the same.
RUN_FLAGS = (
    "--lora 4 --steps 2 --sft_steps 0 --batch 4 --npq 4 --minibatches 1 --max_answer 24 --warmup 1 "
    "--entropy_bonus 1 --eval_data none --save_every 1 --keep 9"
)


def files_of(directory):
    return {path.name: load_file(path) for path in directory.rglob("*.safetensors")}


def test_a_run_leaves_merged_weights_and_adapters_and_resumes(
    tmp_path, train_here, monkeypatch, record_property
):
    """A run saves only adapters in checkpoints, and ends with the merged model and the adapters. It
    resumes to the same weights, bit for bit, but not with another base."""
    out = tmp_path / "run"
    flags = arguments([RUN_FLAGS, "--out", out])
    monkeypatch.setattr(train, "make_mesh", lambda *_: mesh(1, 2, 1))
    train_here(*flags)
    gaps = [row["logprob_gap/max"] for row in read_jsonl(out / "metrics.jsonl")]
    assert 0 < max(gaps) < 1e-4, "sampler and trainer disagree"
    record_property("logprob gap", f"{max(gaps):.1e}")
    (saved,) = files_of(out / "step_000002").values()
    assert {key.split("/")[0] for key in saved} == {"params", "opt"}
    assert all(re.search("_[ab]_L", key) for key in saved), saved.keys()

    base, cfg = load(out / "tiny-seed1.0")
    lora_cfg = train.Config(lora=4, adapter=str(out / "final/adapter"), dtype="float32")
    adapters = lora.read(lora_cfg, cfg)
    wanted = merged(jax.device_get(model.flatten(base)), adapters, 8.0, cfg)
    final, _ = load(out / "final")
    final = jax.device_get(model.flatten(final))
    for name, weight in wanted.items():
        assert_allclose(final[name], weight, atol=1e-6, err_msg=name)
        is_adapted = name in lora.adapted_matrices(cfg)
        assert (final[name] != jax.device_get(model.flatten(base))[name]).any() == is_adapted
    # A run that starts from these adapters has them in its first state.
    shapes = abstract_state(lora_cfg, cfg, mesh(), train.optimizer)
    files = hf.ModelFiles(str(out / "tiny-seed1.0"), cfg)
    start = initial_state(files, shapes, lora_cfg, mesh(), train.optimizer, adapters)
    jax.tree.map(assert_array_equal, jax.device_get(model.flatten(start["params"])), adapters)

    more = f"--model {out}/final --adapter {out}/final/adapter --out {tmp_path}/more --data arith "
    more += "--max_prompt 32 --system="
    message = refused(flags, more)
    assert "cannot be used: the adapters belong to" in message, message

    wanted = files_of(out / "final")
    for name in "final", "step_000002":
        shutil.rmtree(out / name)
    shutil.copytree(out / "tiny-seed1.0", tmp_path / "kept")
    edit(out / "tiny-seed1.0/model.safetensors", {"model.norm.weight": np.full(128, 2, np.float32)})
    message = refused(flags)
    assert "cannot resume: the adapters belong to tiny, whose model.safetensors" in message
    shutil.rmtree(out / "tiny-seed1.0")
    (tmp_path / "kept").rename(out / "tiny-seed1.0")
    train_here(*flags)
    jax.tree.map(assert_array_equal, files_of(out / "final"), wanted)


# test_a_run_leaves_merged_weights_and_adapters_and_resumes is its short form.
@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_run_with_adapters_is_the_undisturbed_one(
    tmp_path, tmp_path_factory, record_property
):
    def flags(steps):
        return lives(tmp_path_factory, steps, "--lora 4 --lr 1e-3 --sft_lr 1e-2")

    out = check_kills(tmp_path, flags, 2, 1, 1, record_property)
    jax.tree.map(assert_array_equal, files_of(out / "final"), files_of(tmp_path / "calm/final"))
