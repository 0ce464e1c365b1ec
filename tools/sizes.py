"""Shapes of models by name: the embedded default, Qwen2.5, and one size in between."""

from model import ModelConfig

# The columns are V D F N K H L tied. "tiny" is the embedded default, "45M" suits a CPU, and the
# others are Qwen2.5.
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
}
# fmt: on


def model_of_size(name: str) -> ModelConfig:
    """Returns the config of a model in SIZES, without what depends on the tokenizer."""
    V, D, F, N, K, H, L, tied = SIZES[name]
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
        # Without stop tokens every row decodes its full length.
        stop_ids=(),
    )
