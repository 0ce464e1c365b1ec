"""Prompts as text: the chat template, and the tokenizer that turns the text into token ids."""

import os
from collections.abc import Sequence

import tokenizers

from infra.data import columns
from infra.host.console import check, exit_on

# No prompt may contain these: chat marks would end it early, and surrogates are half a character.
MARKS = r"<\|(?:im_start|im_end|endoftext)\|>|[\ud800-\udfff]"


# The tiny model is saved with this ChatML template, for other programs that load it. Qwen's own
# tokenizers come with a template.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(system: str, question: str) -> str:
    """Qwen's chat template, ChatML: the system and user messages, and the start of the answer."""
    return render(columns.messages_of({"question": question}, system))


def render(messages: Sequence[dict]) -> str:
    """The text of messages in ChatML, up to the start of the answer."""
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def load_tokenizer(directory: str) -> tuple[tokenizers.Tokenizer, int]:
    """Returns (tokenizer, id of <|im_end|>). Exits with code 2 unless it is a Qwen2 tokenizer."""
    path = f"{directory}/tokenizer.json"
    text = "<|im_start|>What is 2 + 3?<|im_end|>"
    check(os.path.isfile(path), f"{path} is missing; a Qwen2's, with its model, is on the hub")
    with exit_on(Exception, f"{path} is not a readable tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_file(path)
        # The file may turn these on for other uses than training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        start = tokenizer.token_to_id("<|im_start|>")
        end = tokenizer.token_to_id("<|im_end|>")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
    check(
        ids[:1] == [start] and ids[-1:] == [end] and decoded == text,
        f"{path} makes {decoded!r} of {text!r}, or has no <|im_start|> and <|im_end|>: not the "
        "tokenizer of a Qwen2",
    )
    return tokenizer, end
