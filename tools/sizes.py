"""Shapes of models by name: the embedded default, one size for CPUs, Qwen2.5 and Qwen3."""

from model import FAMILIES, ModelConfig

# The columns are V D F N K H L tied. "tiny" is the embedded default, and "45M" suits a CPU.
# Sizes without the name of a family are Qwen2.5.
# fmt: off
SIZES = {
    "tiny": (320, 128, 256, 4, 2, 32, 2, 1),
    "45M": (151936, 256, 1024, 4, 2, 64, 6, 1),
    "0.5B": (151936, 896, 4864, 14, 2, 64, 24, 1),
    "1.5B": (151936, 1536, 8960, 12, 2, 128, 28, 1),
    "3B": (151936, 2048, 11008, 16, 2, 128, 36, 1),
    "7B": (152064, 3584, 18944, 28, 4, 128, 28, 0),
    "14B": (152064, 5120, 13824, 40, 8, 128, 48, 0),
    "32B": (152064, 5120, 27648, 40, 8, 128, 64, 0),
    "Qwen3-0.6B": (151936, 1024, 3072, 16, 8, 128, 28, 1),
    "Qwen3-1.7B": (151936, 2048, 6144, 16, 8, 128, 28, 1),
    "Qwen3-4B": (151936, 2560, 9728, 32, 8, 128, 36, 1),
    "Qwen3-8B": (151936, 4096, 12288, 32, 8, 128, 36, 0),
    "Qwen3-14B": (151936, 5120, 17408, 40, 8, 128, 40, 0),
    "Qwen3-32B": (151936, 5120, 25600, 64, 8, 128, 64, 0),
}
# fmt: on


def family_of(name: str) -> str:
    """Returns the model_type of a model in SIZES."""
    return "qwen3" if name.startswith("Qwen3") else "qwen2"


def model_of_size(name: str) -> ModelConfig:
    """Returns the config of a model in SIZES, without the fields that depend on the tokenizer."""
    V, D, F, N, K, H, L, tied = SIZES[name]
    family = FAMILIES[family_of(name)]
    return ModelConfig(
        V=V,
        D=D,
        F=F,
        N=N,
        K=K,
        H=H,
        L=L,
        rope_theta=1e6,
        rms_eps=1e-6,
        tied=bool(tied),
        max_positions=32768,
        # Without stop tokens, every row decodes its full length.
        stop_ids=(),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )
