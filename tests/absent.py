"""Helpers for tests that compile programs for absent devices."""

import json
import sys
import tempfile

import pytest
from conftest import arguments, run

from tools.sizes import SIZES, family_of


def write_config(directory, size, **changes):
    """Write the config.json of a model of this size, which is enough to compile it. Returns the
    directory."""
    V, D, F, N, K, H, L, tied = SIZES[size]
    family = family_of(size)
    config = dict(
        model_type=family,
        head_dim=H,
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


def compile_elsewhere(*command, compiler="libtpu", home=None, **options):
    """Run a Python program that compiles for absent devices, and return its output. Each compiler
    needs a process of its own. home: a directory whose plans are remembered."""
    pytest.importorskip(compiler)
    # Undo the settings that make other tests cheap. Matrix products get the precision that users
    # have: splash attention refuses higher ones in bfloat16. JAX cannot read programs for absent
    # devices back from its compilation cache, so the cache is off.
    environment = dict(
        XLA_FLAGS="", JAX_DEFAULT_MATMUL_PRECISION="default", JAX_ENABLE_COMPILATION_CACHE="false"
    )
    # An empty HOME hides the results of earlier plans in the user's cache.
    with tempfile.TemporaryDirectory() as empty:
        environment["HOME"] = str(home or empty)
        return run(sys.executable, *arguments(command), **environment, **options)
