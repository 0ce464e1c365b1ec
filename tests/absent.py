"""For tests that compile programs for devices that are not here."""

import json
import sys
import tempfile

import pytest
from conftest import arguments, run

from tools.sizes import SIZES


def write_config(directory, size, **changes):
    """A directory with the config.json of a size of Qwen2.5, which is enough to compile for."""
    V, D, F, N, K, _, L, tied = SIZES[size]
    config = dict(
        model_type="qwen2",
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_attention_heads=N,
        num_key_value_heads=K,
        num_hidden_layers=L,
        tie_word_embeddings=bool(tied),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    )
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def compile_elsewhere(*command, compiler="libtpu", **options):
    """What a Python program that compiles for absent devices prints. A compiler wants a process of
    its own."""
    pytest.importorskip(compiler)
    # What makes other tests cheap is not for these compilers. Matrix products have the precision
    # that users have; in bfloat16, splash attention refuses more. And JAX cannot read programs for
    # absent devices back from its compilation cache.
    environment = dict(
        XLA_FLAGS="", JAX_DEFAULT_MATMUL_PRECISION="default", JAX_ENABLE_COMPILATION_CACHE="false"
    )
    # What an earlier plan has found is in the user's cache.
    with tempfile.TemporaryDirectory() as home:
        return run(sys.executable, *arguments(command), HOME=home, **environment, **options)
