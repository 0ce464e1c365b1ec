"""Dense Qwen2, Qwen2.5, Qwen3 and Llama: config, parameters, training forward, cached forward.

Array names end in their shapes: B rows, T query positions, S key positions, D model width, F
feed-forward width, N query heads, K key/value heads, G = N/K, H head dim, V vocabulary, L layers,
R rank of adapters.
`wq_LDNH` has shape [L, D, N, H]; the scan over layers removes L, but weights keep their names.

Parameters are a nested dict of arrays, with layers stacked on L. Master weights are float32,
sharded over the mesh axes `fsdp` and `tp`, and replicated over `dp`. The forward pass casts weights
to the compute dtype, accumulates matmuls in float32, and computes norms and softmax in float32.
Architectures: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388), Llama 3 (2407.21783).
"""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("dp", "fsdp", "tp")  # mesh axes
ROWS = ("dp", "fsdp")  # mesh axes that shard the rows of a batch
# Memory spaces. --offload keeps optimizer state, and optionally parameters, in host memory.
DEVICE = jax.memory.Space.Device
HOST = jax.memory.Space.Host


# ---------------------------------------------------------------- config
class Llama3Rope(NamedTuple):
    """Llama 3's scaling of the rotary embedding. Fields are named as in config.json."""

    factor: float  # divides low frequencies
    low_freq_factor: float  # low frequencies make fewer turns than this in the original context
    high_freq_factor: float  # high frequencies make more turns than this in the same context
    original_max_position_embeddings: float  # the original context, in tokens


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, named by the letters above, and its switches."""

    V: int
    D: int
    F: int
    N: int
    K: int
    H: int
    L: int
    rope_theta: float
    rms_eps: float
    tied: bool  # whether the LM head is the embedding
    max_positions: int
    stop_ids: tuple  # token ids that end an answer
    qkv_bias: bool = True  # whether queries, keys and values have biases
    qk_norm: bool = False  # whether queries and keys are normalised
    rope_scaling: Llama3Rope | None = None

    @property
    def untied(self) -> bool:
        return not self.tied

    @property
    def n_params(self) -> int:
        return sum(math.prod(shape) for shape in shapes(self).values())

    @property
    def n_multiplied(self) -> int:
        """Number of parameters, without an untied embedding: it is looked up, not multiplied."""
        return self.n_params - (0 if self.tied else self.V * self.D)


class Family(NamedTuple):
    """What a model_type in config.json implies about the model."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    defaults: dict  # the values that transformers uses where config.json has none


# fmt: off
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, defaults={}),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, defaults={"head_dim": 128}),
    "llama": Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False,
                    defaults={"max_position_embeddings": 2048, "eos_token_id": 2}),
}
# fmt: on


def eos_ids(config: dict) -> list:
    """The ids in a config's `eos_token_id`, which is one id, a list, or missing."""
    ids = config.get("eos_token_id")
    if isinstance(ids, list):
        return ids
    return [] if ids is None else [ids]


def config_from_hf(config: dict, generation: dict) -> ModelConfig:
    """The ModelConfig for a Hugging Face config.json.

    generation: generation_config.json, which may name more stop ids; {} if there is no such file.
    Raises NotImplementedError for a model that this file does not support, and ValueError,
    TypeError or other exceptions for malformed values.
    """
    refuse_unsupported(config)
    family = FAMILIES[config["model_type"]]
    config = family.defaults | config
    N = number(config, "num_attention_heads")
    D = number(config, "hidden_size")
    V = number(config, "vocab_size")
    stop_ids = []
    for source in (config, generation):
        stop_ids += [i for i in eos_ids(source) if i not in stop_ids]
    if not all(type(i) is int and 0 <= i < V for i in stop_ids):
        raise ValueError(f"eos_token_id = {stop_ids} has ids outside of vocab_size = {V}")
    # `refuse_unsupported` has checked that all values of a setting are the same.
    rope = {name: values[0] for name, values in rope_settings(config).items()}
    cfg = ModelConfig(
        V=V,
        D=D,
        F=number(config, "intermediate_size"),
        L=number(config, "num_hidden_layers", end=10**4),
        N=N,
        K=number(config, "num_key_value_heads", default=N),
        H=number(config, "head_dim", default=D // N),
        rope_theta=float(number(rope, "rope_theta", default=1e4, kind=float, end=1e38)),
        rms_eps=float(number(config, "rms_norm_eps", default=1e-6, kind=float, end=1)),
        tied=bool(config.get("tie_word_embeddings")),
        max_positions=number(config, "max_position_embeddings", default=32768),
        stop_ids=tuple(stop_ids),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=llama3_rope(rope) if rope.get("rope_type") == "llama3" else None,
    )
    if cfg.N % cfg.K or cfg.H % 2:
        raise ValueError(
            f"{cfg.N} query heads, {cfg.K} key/value heads of size {cfg.H}: the number of query "
            "heads must be a multiple of the number of key/value heads, and their size even"
        )
    return cfg


def number(config: dict, name: str, default=None, kind: type = int, end: float = 2**31):
    """Read a positive number below `end` from a config.json; `default` if missing or null."""
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, kind) or not 0 < value < end:
        raise ValueError(f"{name} = {value!r} is not a positive {kind.__name__} below {end}")
    return value


def llama3_rope(rope: dict) -> Llama3Rope:
    scaling = Llama3Rope(
        *(float(number(rope, name, kind=float, end=1e38)) for name in Llama3Rope._fields)
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(f"{scaling}: low_freq_factor must be below high_freq_factor")
    return scaling


def rope_settings(config: dict) -> dict:
    """Returns {name: values} of the rotary embedding's settings. A setting has several values if it
    occurs in several places in the config.json."""
    # transformers 5 writes rope_parameters; transformers 4 wrote rope_scaling and rope_theta.
    places = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    places.append({name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")})
    settings = {}
    for place in places:
        for name, value in place.items():
            key = "rope_type" if name == "type" else name
            if value is not None:
                settings.setdefault(key, []).append(value)
    return settings


def refuse_unsupported(config: dict) -> None:
    """Raise NotImplementedError if a config.json asks for a feature that this file lacks."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise NotImplementedError(f"model_type {model_type!r}; only {known} are supported")
    architectures = config.get("architectures")
    tied = config.get("tie_word_embeddings")
    activation = config.get("hidden_act", "silu")
    layer_types = set(config.get("layer_types") or [])
    rope = rope_settings(config)
    rope_types = rope.pop("rope_type", ["default"])
    rotated = rope.pop("partial_rotary_factor", [])
    other_types = [str(kind) for kind in rope_types if kind not in ("default", "llama3")]
    settings = ["rope_theta", *(Llama3Rope._fields if "llama3" in rope_types else [])]
    other_settings = [name for name in rope if name not in settings]
    contradictions = [
        f"{name} {values}"
        for name, values in [("rope_type", rope_types), *rope.items()]
        if any(value != values[0] for value in values)
    ]

    # Each row: (whether to refuse the model, what its config has, what is supported instead).
    # fmt: off
    table = [
        (architectures not in (None, [family.architecture]),
         f"architectures {architectures}", f"{family.architecture} is"),
        (other_types, f"rope scaling {', '.join(other_types)}", "none and llama3 are"),
        (other_settings, f"rope settings {other_settings}", f"{settings} are"),
        (contradictions, "; ".join(contradictions), "one value is"),
        (any(share != 1 for share in rotated),
         "a partial_rotary_factor", "rotation of all dimensions is"),
        (config.get("use_sliding_window"), "use_sliding_window = true", "full attention is"),
        (layer_types - {"full_attention"}, "sliding-window layers", "full attention is"),
        # Qwen2 always has biases for queries, keys and values, whatever its config says.
        (config.get("attention_bias") and not family.qkv_bias,
         "attention_bias = true", "attention without biases is"),
        (config.get("mlp_bias"), "mlp_bias = true", "a feed-forward without biases is"),
        (config.get("quantization_config"), "quantised weights",
         "float32, bfloat16 and float16 are"),
        (activation != "silu", f"hidden_act {activation!r}", "silu is"),
        (not isinstance(tied, bool | None),
         f"tie_word_embeddings = {tied!r}", "true and false are"),
    ]
    # fmt: on
    for is_refused, found, supported in table:
        if is_refused:
            raise NotImplementedError(f"{found}; only {supported} supported")


# ---------------------------------------------------------------- parameters
# our name: (Hugging Face name, Hugging Face dimensions, switch). "NH" is one dimension, N * H.
# A model has the tensor only if this switch of its ModelConfig is on; None: every model has it.
TENSORS = {
    "embed_VD": ("model.embed_tokens.weight", "V D", None),
    "layers/attn_norm_LD": ("model.layers.{}.input_layernorm.weight", "D", None),
    "layers/wq_LDNH": ("model.layers.{}.self_attn.q_proj.weight", "NH D", None),
    "layers/bq_LNH": ("model.layers.{}.self_attn.q_proj.bias", "NH", "qkv_bias"),
    "layers/q_norm_LH": ("model.layers.{}.self_attn.q_norm.weight", "H", "qk_norm"),
    "layers/wk_LDKH": ("model.layers.{}.self_attn.k_proj.weight", "KH D", None),
    "layers/bk_LKH": ("model.layers.{}.self_attn.k_proj.bias", "KH", "qkv_bias"),
    "layers/k_norm_LH": ("model.layers.{}.self_attn.k_norm.weight", "H", "qk_norm"),
    "layers/wv_LDKH": ("model.layers.{}.self_attn.v_proj.weight", "KH D", None),
    "layers/bv_LKH": ("model.layers.{}.self_attn.v_proj.bias", "KH", "qkv_bias"),
    "layers/wo_LNHD": ("model.layers.{}.self_attn.o_proj.weight", "D NH", None),
    "layers/mlp_norm_LD": ("model.layers.{}.post_attention_layernorm.weight", "D", None),
    "layers/w_gate_LDF": ("model.layers.{}.mlp.gate_proj.weight", "F D", None),
    "layers/w_up_LDF": ("model.layers.{}.mlp.up_proj.weight", "F D", None),
    "layers/w_down_LFD": ("model.layers.{}.mlp.down_proj.weight", "D F", None),
    "norm_D": ("model.norm.weight", "D", None),
    "head_VD": ("lm_head.weight", "V D", "untied"),
}


def letters(name: str) -> str:
    """The dimensions of a parameter: "LDNH" for "layers/wq_LDNH"."""
    return name.rsplit("_", 1)[1]


def shapes(cfg: ModelConfig) -> dict:
    """{flat name: shape} of all parameters."""
    switches = {name: switch for name, (_, _, switch) in TENSORS.items()}
    names = [name for name, switch in switches.items() if switch is None or getattr(cfg, switch)]
    return {name: tuple(getattr(cfg, letter) for letter in letters(name)) for name in names}


def spec(name: str) -> P:
    """PartitionSpec of a parameter in training."""
    dims = letters(name)
    # Matrices are sharded over fsdp along D; matrices and biases over tp along heads or F.
    axes = {"N": "tp", "K": "tp", "F": "tp", "D": "fsdp"}
    if "V" in dims:
        # fsdp * tp may not divide V, so the embedding and the head shard D over both axes.
        axes = {"D": ("fsdp", "tp")}
    elif dims in ("D", "LD", "LH"):
        # Norm scales are replicated.
        axes = {}
    return P(*(axes.get(letter) for letter in dims))


def nest(flat: dict) -> dict:
    """Turn {"layers/wq_LDNH": a} into {"layers": {"wq_LDNH": a}}."""
    layers = {name.removeprefix("layers/"): a for name, a in flat.items() if "/" in name}
    others = {name: a for name, a in flat.items() if "/" not in name}
    return others | {"layers": layers}


def flatten(tree) -> dict:
    """Turn any tree of dicts and tuples into a flat {"layers/wq_LDNH": a}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): a for path, a in leaves}


def shardings(names, mesh: Mesh) -> dict:
    """NamedSharding of the parameters with these flat names, as a nested dict."""
    return nest({name: NamedSharding(mesh, spec(name)) for name in names})


def adapter_names(name: str) -> tuple[str, str]:
    """The names of a matrix's adapters A and B: for "wq_LDNH", "wq_a_LDR" and "wq_b_LRNH"."""
    stem, dims = name.rsplit("_", 1)
    # A matmul sums over D if D follows L, and otherwise over all dimensions between L and D.
    summed = "D" if dims[1] == "D" else dims[1:-1]
    kept = dims[1 + len(summed) :]
    return f"{stem}_a_L{summed}R", f"{stem}_b_LR{kept}"


def is_adapter(name: str) -> bool:
    return "R" in letters(name)


def head(params: dict) -> jax.Array:
    """The LM head [V, D]: an array of its own, or the tied embedding."""
    return params.get("head_VD", params["embed_VD"])


def constrain(x, mesh: Mesh, *axes) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


# ---------------------------------------------------------------- matrices: int8, or with adapters
class Quantised(NamedTuple):
    """A matrix as int8 times scale, with one scale for each output channel of its matmul."""

    int8: jax.Array
    scale: jax.Array  # float32; of size 1 in the dimensions that the matmul sums over


def dequantise(w, dtype) -> jax.Array:
    """Convert a matrix, quantised or not, to dtype."""
    if isinstance(w, Quantised):
        w = w.int8 * w.scale
    return w.astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen matrix W, of one layer or a stack of layers, plus a low-rank product: W + scale A B
    (LoRA, arXiv 2106.09685)."""

    w: jax.Array  # W, or W joined with A or B, see `join`
    a: jax.Array  # A: the dimensions of W that the matmul sums over, and R
    b: jax.Array  # B: R, and the other dimensions of W
    scale: float = dataclasses.field(metadata=dict(static=True))
    sums_over_D: bool = dataclasses.field(metadata=dict(static=True))  # if not, D is the output
    is_joined: bool = dataclasses.field(metadata=dict(static=True), default=False)


def adapted(weights: dict, scale: float, are_joined: bool = False) -> dict:
    """Pair matrices with their adapters. weights: the weights and adapters of layers, by name.
    are_joined: whether the matrices come from `joined_matrices`. Returns the weights by name; a
    matrix that has adapters becomes an Adapted that holds them."""
    paired = {}
    for name, w in weights.items():
        a, b = adapter_names(name)
        if a in weights:
            sums_over_D = letters(name)[1] == "D"
            paired[name] = Adapted(w, weights[a], weights[b], scale, sums_over_D, are_joined)
        elif not is_adapter(name):
            paired[name] = w
    return paired


def merge(w) -> jax.Array:
    """W + scale A B of an Adapted in float32; other weights are returned as they are."""
    if not isinstance(w, Adapted):
        return w
    a = w.a.astype(jnp.float32)
    b = w.b.astype(jnp.float32)
    return w.w.astype(jnp.float32) + w.scale * jnp.tensordot(a, b, 1, precision="highest")


def join(w: Adapted) -> jax.Array:
    """W extended along D by an adapter: [W; scale B] if the matmul sums over D, else [W, scale A].
    A matmul with the joined matrix also computes the product with that adapter."""
    adapter, axis = (w.b, 0) if w.sums_over_D else (w.a, -1)
    return jnp.concatenate([w.w, (w.scale * adapter).astype(w.w.dtype)], axis)


def joined_matrices(weights: dict, scale: float) -> dict:
    """The joined matrix of each matrix that has adapters, by name."""
    pairs = adapted(weights, scale)
    return {name: join(w) for name, w in pairs.items() if isinstance(w, Adapted)}


def matmul(equation: str, x, w) -> jax.Array:
    """einsum in x's dtype, accumulated and returned in float32."""
    if isinstance(w, Adapted) and w.is_joined:
        return matmul_joined(equation, w.scale, x, w.w, w.a, w.b)
    if isinstance(w, Adapted):
        of_x, of_y, rows, summed, kept = low_rank_dims(equation)
        xa = matmul(f"{of_x},{summed}R->{rows}R", x, w.a).astype(x.dtype)
        return matmul(equation, x, w.w) + w.scale * matmul(f"{rows}R,R{kept}->{of_y}", xa, w.b)
    if isinstance(w, Quantised):
        # x's dtype represents every int8 exactly. The einsum with ones arranges the scales like the
        # output, so that they broadcast over it.
        scale = jnp.einsum(equation, jnp.ones([1] * x.ndim), w.scale, precision="highest")
        return scale * matmul(equation, x, w.int8)
    # By default, a TPU or GPU would round float32 inputs.
    precision = "highest" if x.dtype == jnp.float32 else "default"
    w = w.astype(x.dtype)
    return jnp.einsum(equation, x, w, precision=precision, preferred_element_type=jnp.float32)


def low_rank_dims(equation: str) -> tuple[str, ...]:
    """For a matmul y = x W with adapters, returns the dimensions of x and y, and the dimensions of
    x A, A and B without R."""
    of_x, of_w, of_y = re.split(",|->", equation)
    if of_w[0] == "D":
        # For "BTD,DNH->BNTH", x A is "BTD,DR->BTR", and (x A) B is "BTR,RNH->BNTH".
        return of_x, of_y, of_x[:-1], "D", of_w[1:]
    # For "BNTH,NHD->BTD", x A is "BNTH,NHR->BTR", and (x A) B is "BTR,RD->BTD".
    return of_x, of_y, of_y[:-1], of_w[:-1], "D"


# A product with A or B alone takes few operations, but may read or write an array as large as x or
# the result. So one of the two is joined to W, and its product becomes a part of the product with
# W, in the forward and in the backward pass.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def matmul_joined(equation: str, scale: float, x, joined, a, b) -> jax.Array:
    """x W + scale (x A) B in float32. joined: the matrix from `join`, which gets no gradient."""
    of_x, of_y, rows, summed, kept = low_rank_dims(equation)
    if summed == "D":
        xa = matmul(f"{of_x},DR->{rows}R", x, a).astype(x.dtype)
        return matmul(equation, jnp.concatenate([x, xa], -1), joined)
    y, scaled_xa = split_joined(matmul(equation, x, joined), a)
    return y + matmul(f"{rows}R,RD->{of_y}", scaled_xa.astype(x.dtype), b)


def split_joined(product, a):
    """Split a product with a joined matrix into its columns for D and for R."""
    D = product.shape[-1] - a.shape[-1]
    return product[..., :D], product[..., D:]


def matmul_joined_forward(equation, scale, *arrays):
    return matmul_joined(equation, scale, *arrays), arrays


def matmul_joined_backward(equation, scale, arrays, d_y):
    x, joined, a, b = arrays
    of_x, of_y, rows, summed, kept = low_rank_dims(equation)
    of_w = summed + kept
    d_y = d_y.astype(x.dtype)
    if summed == "D":
        d_x, d_xa = split_joined(matmul(f"{of_y},{of_w}->{of_x}", d_y, joined), a)
        d_xa = d_xa.astype(x.dtype)
        d_x += matmul(f"{rows}R,DR->{of_x}", d_xa, a)
    else:
        d_xa = matmul(f"{of_y},RD->{rows}R", d_y, b).astype(x.dtype)
        d_x = matmul(f"{of_y},{of_w}->{of_x}", jnp.concatenate([d_y, d_xa], -1), joined)
        d_xa = scale * d_xa
    xa = matmul(f"{of_x},{summed}R->{rows}R", x, a).astype(x.dtype)
    d_a = matmul(f"{of_x},{rows}R->{summed}R", x, d_xa)
    d_b = scale * matmul(f"{rows}R,{of_y}->R{kept}", xa, d_y)
    return d_x.astype(x.dtype), None, d_a.astype(a.dtype), d_b.astype(b.dtype)


matmul_joined.defvjp(matmul_joined_forward, matmul_joined_backward)


# ---------------------------------------------------------------- the transformer
def rms_norm(x, scale, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, -1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def rope_tables(positions_BT, cfg: ModelConfig) -> tuple:
    """cos and signed sin of the rotary angles, float32 [B, 1, T, H] (arXiv 2104.09864)."""
    frequency = cfg.rope_theta ** (-jnp.arange(0, cfg.H, 2, dtype=jnp.float32) / cfg.H)
    if cfg.rope_scaling:
        factor, low, high, context = cfg.rope_scaling
        turns = context * frequency / (2 * math.pi)
        # Divide low frequencies by the factor, keep high ones, and interpolate between the two.
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = positions_BT[:, None, :, None].astype(jnp.float32) * frequency
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rotate(x, rope: tuple) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of x [B, heads, T, H]. Returns float32."""
    cos, sin = rope
    # Weights on the Hugging Face hub are ordered for the pairs (i, i + H/2). The paper pairs
    # (2i, 2i + 1).
    return x * cos + jnp.roll(x, x.shape[-1] // 2, -1) * sin


def attention(q_BNTH, k_BKSH, v_BKSH, mask_BTS) -> jax.Array:
    """Grouped-query attention without repeated keys and values. Returns float32 [B, N, T, H].

    q_BNTH: already scaled by H ** -0.5. mask_BTS: whether a query attends to a key.
    """
    B, N, T, H = q_BNTH.shape
    K = k_BKSH.shape[1]
    # Each group of G consecutive query heads shares one of the K key/value heads.
    q_BKGTH = q_BNTH.reshape(B, K, -1, T, H)
    scores = matmul("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    probs = jax.nn.softmax(scores, -1)
    out = matmul("BKGTS,BKSH->BKGTH", probs.astype(v_BKSH.dtype), v_BKSH)
    return out.reshape(B, N, T, H)


@jax.custom_vjp
def computed_once(h):
    """Make XLA compute h before the matmul that reads it. Fused into the matmul, h would be
    computed again for each tile of the output. Where h is differentiated, there is no barrier: XLA
    is faster without one."""
    return jax.lax.optimization_barrier(h)


computed_once.defvjp(lambda h: (h, None), lambda _, d_h: (d_h,))


def layer(cfg, x_BTD, w: dict, rope, attend: Callable, sum_parts=lambda y: y):
    """One transformer layer. Returns (x_BTD, extra).

    attend(q, k, v) -> ([B, N, T, H], extra): the caller's attention; extra is the new KV cache in a
    rollout, and None in training. sum_parts(y): the sum of y over devices, each of which has a part
    of the heads and of F.
    """
    dtype = x_BTD.dtype

    # Name values for the policies in REMAT. `save` also rounds matmul outputs to the compute dtype,
    # because they may be kept for the backward pass.
    def save(a):
        return checkpoint_name(a.astype(dtype), "dot")

    def save_elementwise(a):
        return checkpoint_name(a, "elementwise")

    # Attention.
    h = save_elementwise(rms_norm(x_BTD, w["attn_norm_LD"], cfg.rms_eps))
    q = matmul("BTD,DNH->BNTH", h, w["wq_LDNH"])
    k = matmul("BTD,DKH->BKTH", h, w["wk_LDKH"])
    v = matmul("BTD,DKH->BKTH", h, w["wv_LDKH"])
    if cfg.qkv_bias:
        q = q + w["bq_LNH"][:, None]
        k = k + w["bk_LKH"][:, None]
        v = v + w["bv_LKH"][:, None]
    if cfg.qk_norm:
        # The backward pass of these norms reads their inputs, so save the inputs too.
        q = rms_norm(save(q), w["q_norm_LH"], cfg.rms_eps)
        k = rms_norm(save(k), w["k_norm_LH"], cfg.rms_eps)
    q = q * cfg.H**-0.5
    out, extra = attend(save(rotate(q, rope)), save(rotate(k, rope)), save(v))
    out = matmul("BNTH,NHD->BTD", save(out), w["wo_LNHD"])
    x_BTD = save(x_BTD + sum_parts(out).astype(dtype))

    # Feed-forward.
    h = save_elementwise(rms_norm(x_BTD, w["mlp_norm_LD"], cfg.rms_eps))
    gate = save(matmul("BTD,DF->BTF", h, w["w_gate_LDF"]))
    up = save(matmul("BTD,DF->BTF", h, w["w_up_LDF"]))
    h = computed_once(save_elementwise(jax.nn.silu(gate) * up))
    out = matmul("BTF,FD->BTD", h, w["w_down_LFD"])
    return x_BTD + sum_parts(out).astype(dtype), extra


# ---------------------------------------------------------------- the training forward
# Remat policies. The forward pass saves each layer's input and the values with these names. The
# backward pass recomputes the rest. Gathered weights have no name, so they are gathered again.
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("dot"),
    "none": jax.checkpoint_policies.save_only_these_names("dot", "elementwise"),
}
# Maximum number of tokens that a device runs through a layer at once, unless a row is longer.
# Matmuls of this many tokens are efficient; more would only take more memory for activations.
TOKENS_AT_ONCE = 2048


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """Options of the training forward."""

    dtype: str  # compute dtype
    # (q_BNTH, k_BKTH, v_BKTH, segments_BT) -> [B, N, T, H], from infra/update/attention.py
    attend: Callable
    remat: str = "full"  # a key of REMAT
    lora_scale: float = 0.0  # scale of adapters, if the layers have any


# From here to `forward`, which says what masters are, functions run inside a shard_map, on one
# device's rows and weight shards. infra/update/packing.py also calls `rows_at_once`, to count
# padding.
def fsdp_axis(name):
    """The index of the axis of a layer's weight that fsdp shards, or None."""
    axes = spec(f"layers/{name}")[1:]  # without L
    return axes.index("fsdp") if "fsdp" in axes else None


def gather_layer(shards):
    """All-gather a layer's weights over fsdp; the backward pass reduce-scatters their gradients."""

    def gather(name, shard):
        axis = fsdp_axis(name)
        if axis is None:
            return shard
        return jax.lax.all_gather(shard, "fsdp", axis=axis, tiled=True)

    return {name: gather(name, shard) for name, shard in shards.items()}


@jax.custom_vjp
def with_gradients_to(w, masters):
    """Returns (w, masters) unchanged. The backward pass adds the gradients of w to the gradients of
    masters, in float32.

    w: a layer's trained weights in the compute dtype. masters: the same weights in float32, see
    `forward`.
    """
    return w, masters


def with_gradients_to_backward(_, grads):
    d_w, d_masters = grads
    return None, {name: d + d_w[name].astype(d.dtype) for name, d in d_masters.items()}


with_gradients_to.defvjp(lambda *args: (args, None), with_gradients_to_backward)


def look_up(embed_Vd, tokens_BT, dtype):
    """Embeddings [B, T, D] of this device's tokens, without gathering the table.

    Each device looks up its columns of the table for the tokens of all devices along fsdp. An
    all-gather over tp and an all-to-all over fsdp give it all columns for its own tokens.
    """
    tokens = jax.lax.all_gather(tokens_BT, "fsdp", tiled=True)
    x = embed_Vd[tokens].astype(dtype)
    x = jax.lax.all_gather(x, "tp", axis=2, tiled=True)
    return jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def rows_at_once(B, T):
    """Number of rows per chunk, given B rows of T tokens.

    A chunk is skipped only if all its rows are padding, so small chunks compute less padding: a
    chunk has at most B / 8 rows, but at least one.
    """
    return max(1, min(TOKENS_AT_ONCE // T, B // 8))


def split_rows(a, chunk):
    """Reshape [B, ...] to [chunks, chunk, ...], with the last chunk padded with zeros."""
    padding = [(0, -len(a) % chunk)]
    padding += [(0, 0)] * (a.ndim - 1)
    return jnp.pad(a, padding).reshape(-1, chunk, *a.shape[1:])


def layer_of_chunk(cfg, options, x_BTD, w, masters, positions_BT, segments_BT):
    """Run `layer` on a chunk of rows. Returns (x_BTD, masters)."""

    def attend(q, k, v):
        return options.attend(q, k, v, segments_BT), None

    # With --lora, only adapters have masters. The frozen weights are read from w, which is a
    # constant, so the backward pass computes no gradients for them.
    trained = {name: w[name] for name in masters}
    trained, masters = with_gradients_to(trained, masters)
    own_w = adapted(w | trained, options.lora_scale, are_joined=True)
    rope = rope_tables(positions_BT, cfg)
    # Heads and F are sharded over tp, so each device computes a part of the sums over them.
    sum_parts = partial(jax.lax.psum, axis_name="tp")
    x_BTD, _ = layer(cfg, x_BTD, own_w, rope, attend, sum_parts)
    return x_BTD, masters


def unless_padding(segments_BT, run, skip, *operands):
    """run(*operands), or skip(*operands) for a chunk without tokens."""
    # Devices along tp have the same rows, so either all of them or none of them reach the psum.
    return jax.lax.cond(jnp.any(segments_BT > 0), run, skip, *operands)


def run_chunk(cfg, options, x_BTD, w, masters, positions_BT, segments_BT):
    """`layer_of_chunk`, but a chunk without tokens is skipped."""

    def run(x_BTD, masters):
        return layer_of_chunk(cfg, options, x_BTD, w, masters, positions_BT, segments_BT)

    return unless_padding(segments_BT, run, lambda *unchanged: unchanged, x_BTD, masters)


# `run_chunk` for --remat full, with a backward pass of its own. With jax.checkpoint, the backward
# pass would be two conds: one that recomputes the chunk, and one that differentiates it. Everything
# that the second reads, weights included, would be copied out of the first.
recomputed_chunk = jax.custom_vjp(run_chunk, nondiff_argnums=(0, 1))


def recomputed_chunk_forward(cfg, options, *arrays):
    # Without jax.checkpoint, JAX would compute the rotary tables and masks of all rows at once,
    # outside the loops, because they depend only on positions and segments.
    return jax.checkpoint(run_chunk, static_argnums=(0, 1))(cfg, options, *arrays), arrays


def recomputed_chunk_backward(cfg, options, arrays, grads):
    """Recompute and differentiate a chunk in one branch of a cond."""
    x_BTD, w, masters, positions_BT, segments_BT = arrays

    def differentiate(x_BTD, masters, grads):
        def run(x_BTD, masters):
            return layer_of_chunk(cfg, options, x_BTD, w, masters, positions_BT, segments_BT)

        _, backward = jax.vjp(run, x_BTD, masters)
        return backward(grads)

    def skip(x_BTD, masters, grads):
        return grads

    d_x, d_masters = unless_padding(segments_BT, differentiate, skip, x_BTD, masters, grads)
    return d_x, None, d_masters, None, None


recomputed_chunk.defvjp(recomputed_chunk_forward, recomputed_chunk_backward)


def forward_on_device(params, at_rest, tokens_BT, positions_BT, segments_BT, cfg, options):
    """`forward` for one device's rows, with its shards of the parameters."""
    B, T = tokens_BT.shape
    chunk = rows_at_once(B, T)
    positions = split_rows(positions_BT, chunk)
    segments = split_rows(segments_BT, chunk)
    remat = partial(jax.checkpoint, policy=REMAT[options.remat], prevent_cse=False)
    if options.remat == "full":
        one_chunk = partial(recomputed_chunk, cfg, options)
    else:
        one_chunk = remat(partial(run_chunk, cfg, options))

    # Remat the whole layer as well as each chunk, so that gathered weights are not kept.
    @remat
    def run_layer(x, one_layer):
        masters, layer_at_rest = one_layer
        # Cast weights before the all-gather: in bfloat16, it takes half the time.
        w = jax.device_put(layer_at_rest, DEVICE)
        w = gather_layer({name: a.astype(options.dtype) for name, a in w.items()})
        # Join the adapters here, once for all chunks.
        w |= joined_matrices(w, options.lora_scale)
        # XLA drops this all-gather, because nothing reads its values. Only its backward matters: it
        # reduce-scatters the gradients. `masters` is the carry of the scan over chunks, so that the
        # backward pass sums the chunks' gradients in float32.
        masters = gather_layer(masters)

        def next_chunk(masters, rows):
            x_BTD, positions_BT, segments_BT = rows
            x_BTD, masters = one_chunk(x_BTD, w, masters, positions_BT, segments_BT)
            return masters, x_BTD

        _, x = jax.lax.scan(next_chunk, masters, (x, positions, segments))
        return x, None

    with jax.named_scope("embed"):
        x_BTD = look_up(params["embed_VD"], tokens_BT, options.dtype)
    with jax.named_scope("layers"):
        layers = params["layers"], at_rest
        x, _ = jax.lax.scan(run_layer, split_rows(x_BTD, chunk), layers)
    x_BTD = x.reshape(-1, T, cfg.D)[:B]
    # Remat the norm: otherwise, float32 hidden states would be kept for its backward pass.
    norm = jax.checkpoint(rms_norm, static_argnums=2)
    return norm(x_BTD, params["norm_D"].astype(options.dtype), cfg.rms_eps)


def forward(params, cfg, mesh, rows, options, at_rest=None):
    """Hidden states after the last norm, [B, T, D] in options.dtype; multiply by `head` for logits.

    Differentiate with respect to `params`: gradients are float32 and reduce-scattered. The
    forward saves the inputs of all layers, [L, B, T, D], and the values that options.remat names.

    rows: `tokens`, `positions`, `segments`, int32 [B, T]. A token attends to tokens of its own
    segment, up to and including itself. Segment 0 is padding; chunks that hold only padding are
    skipped.

    The layers are passed twice. The masters collect the gradients of a layer's chunks in float32,
    outside the cast to the compute dtype. The values may be in host memory (--offload params):
      at_rest            the layers where they are stored. The forward reads their values, and
                         fetches one layer at a time. It may be None if the layers are stored on the
                         devices: then the forward reads params["layers"].
      params["layers"]   the masters: the layers on the devices, or with --lora the adapters alone.
                         Masters only receive gradients. They are in device memory, because JAX
                         puts a gradient where its argument is. With --offload params, they are
                         a copy of the host's layers, which XLA drops, because nothing reads the
                         masters' values.
    `with_gradients_to` adds the gradients of a layer's weights to the gradients of its masters.
    """
    used = {name: param for name, param in params.items() if name != "head_VD"}
    at_rest = at_rest or jax.lax.stop_gradient(params["layers"])
    specs = nest({name: spec(name) for name in flatten(used)})
    specs_at_rest = {name: spec(f"layers/{name}") for name in at_rest}
    # A parameter that is replicated over some axes gets a part of its gradient on each device. The
    # transpose of shard_map sums these parts over the axes that the parameter's spec omits: dp for
    # matrices, dp and fsdp for biases, all axes for norms, and dp with either fsdp or tp for
    # adapters. check_vma is off, because Pallas kernels do not pass it. With it off, the transpose
    # of a psum is a psum, which sums the devices' parts of an activation's gradient.
    by_row = P(ROWS)
    run = jax.shard_map(
        partial(forward_on_device, cfg=cfg, options=options),
        mesh=mesh,
        in_specs=(specs, specs_at_rest, by_row, by_row, by_row),
        out_specs=by_row,
        check_vma=False,
    )
    return run(used, at_rest, rows["tokens"], rows["positions"], rows["segments"])


# ---------------------------------------------------------------- the cached forward
def cached_forward(
    weights, cfg: ModelConfig, layout, tokens_BT, positions_BT, last_B, attends, caches
) -> tuple:
    """Forward pass of T new tokens, with attention to a KV cache.

    Returns (hidden states after the last norm, [B, D], of the token at index last_B in each row;
    new caches). layout: see infra/rollout/layouts.py. attends and caches: one for each stack of
    layers in weights["layers"]. On GPUs, each layer is its own stack; elsewhere, all layers are
    one stack.

    attend(q, k, v, layer=, cache=) -> ([B, N, T, H], cache), from infra/rollout/kv_cache.py, also
    writes the keys and values of the new tokens to the cache.
    """
    rope = rope_tables(positions_BT, cfg)

    def one_layer(attend, carry, w):
        x_BTD, cache, layer_number = carry
        if layout.kind == "fsdp":
            # All-gather this layer's weights, but not before the layer begins: where each layer is
            # a stack of its own, XLA would gather all layers at once.
            w, x_BTD = jax.lax.optimization_barrier((w, x_BTD))
            w = {name: constrain(a, layout.mesh) for name, a in w.items()}
        attend_in_layer = partial(attend, layer=layer_number, cache=cache)
        x_BTD, cache = layer(cfg, x_BTD, w, rope, attend_in_layer)
        return (constrain(x_BTD, layout.mesh, layout.rows), cache, layer_number + 1), None

    # The embedding is an array or Quantised, whose int8 and scale are both looked up.
    x = jax.tree.map(lambda table: table[tokens_BT], weights["embed_VD"])
    x_BTD = constrain(dequantise(x, weights["norm_D"].dtype), layout.mesh, layout.rows)
    # A cache is the scan's carry, so it is updated in place; as xs and ys, it would be copied.
    new_caches = []
    for stack, attend, cache in zip(weights["layers"], attends, caches, strict=True):
        carry = x_BTD, cache, 0
        (x_BTD, cache, _), _ = jax.lax.scan(partial(one_layer, attend), carry, stack)
        new_caches.append(cache)
    x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], 1)[:, 0]
    return rms_norm(x_BD, weights["norm_D"], cfg.rms_eps), tuple(new_caches)
