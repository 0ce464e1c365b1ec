"""A model's tokenizer and chat template: messages become text, and text becomes token ids."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from infra.host import files
from infra.host.console import check, exit_on, say

# ChatML, the template of the tiny model. If there is no system message, ChatML writes an empty one;
# Qwen2.5's template writes a default text.
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The names of special tokens in tokenizer_config.json, which templates use as variables.
TOKEN_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# A surrogate is half a character, which no tokenizer can encode.
HALF_CHARACTER = "[\ud800-\udfff]"


# ---------------------------------------------------------------- the tokenizer
@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model, with its chat template."""

    directory: str  # the model's directory, for error messages
    bpe: tokenizers.Tokenizer
    special: str  # regular expression that matches any special token
    named: dict[str, str]  # {"eos_token": its text, ...}, for the template
    template: jinja2.Template

    def render(self, messages: Sequence[dict], answered: bool = False) -> str:
        """The text of messages, up to the start of the answer. If `answered`, the last message is
        the answer, and the text ends after it. Exits with code 2 if the template fails."""
        fix = ""
        if messages[0]["role"] == "system":
            fix = ' (if it takes no system message, give --system "")'
        with exit_on(Exception, f"the chat template of {self.directory} fails{fix}"):
            # Some templates read tools and documents, even if there are none.
            return self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=not answered,
                **self.named,
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text."""
        ids = []
        # An encoded text takes 20 times the memory of its ids, so encode few texts at a time.
        for start in range(0, len(texts), 1000):
            # The template has already written the special tokens that a prompt needs.
            encoded = self.bpe.encode_batch(texts[start : start + 1000], add_special_tokens=False)
            ids += [text.ids for text in encoded]
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.bpe.decode(ids)

    @property
    def size(self) -> int:
        """The largest token id, plus 1."""
        return max(self.bpe.get_vocab().values()) + 1

    @property
    def refused(self) -> str:
        """A regular expression that no text of a prompt or a row may match. A special token would
        end a message early."""
        return f"{self.special}|{HALF_CHARACTER}"

    @cached_property
    def end(self) -> str:
        """The token that ends an answer: the special token that the template writes after an
        answer, or else the tokenizer's eos."""
        asked = {"role": "user", "content": "What is 2 + 3?"}
        answer = "It is 5."
        text = self.render([asked, {"role": "assistant", "content": answer}], answered=True)
        _, found, rest = text.rpartition(answer)
        written = re.match(rf"\s*({self.special})", rest)
        if found and written:
            return written[1]
        return self.named.get("eos_token", "")

    @property
    def stops(self) -> set[str]:
        """The tokens that end an answer: `end` and the tokenizer's eos. In many base models, eos is
        not the token that ends a turn."""
        return {self.end, self.named.get("eos_token", self.end)}

    @property
    def stop_ids(self) -> set[int]:
        """The ids of the tokens that end an answer."""
        return {self.bpe.token_to_id(token) for token in self.stops}


def load_tokenizer(directory: str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. Exits with code 2 if it cannot be used; raises
    CheckpointError if tokenizer_config.json cannot be read."""
    path = f"{directory}/tokenizer.json"
    text = "What is 2 + 3?"
    convert = conversion("AutoTokenizer", '"HUB/ID"', "DIR")
    check(
        os.path.isfile(path),
        f"{path} is missing; get it from the model on the hub; if the hub has only another format, "
        f"run {convert}",
    )
    named = named_tokens(directory)
    with exit_on(Exception, f"{path} is not a readable tokenizer"):
        bpe = read_bpe(directory)
        # Like transformers, treat named tokens as special even if tokenizer.json does not.
        known = [token for token in named.values() if bpe.token_to_id(token) is not None]
        bpe.add_special_tokens(known)
        decoded = bpe.decode(bpe.encode(text, add_special_tokens=False).ids)
        added = bpe.get_added_tokens_decoder().values()
    check(decoded == text, f"{path} decodes {text!r} as {decoded!r}: it is not a model's tokenizer")

    # A regular expression tries its alternatives in order, and one special token may begin with
    # another, so the longest comes first.
    special = sorted((t.content for t in added if t.special), key=len, reverse=True)
    # (?!) matches nothing.
    pattern = "|".join(map(re.escape, special)) or "(?!)"
    source = template_of(directory)
    if not source:
        with exit_on(Exception, f"{path} is not a readable tokenizer"):
            source = default_template(directory)
        unknown = {"<|im_start|>", "<|im_end|>"} - {token.content for token in added}
        why = f", though its tokenizer has no {' or '.join(sorted(unknown))}" if unknown else ""
        say(f"{directory} has no chat template: prompts are written in ChatML{why}")
    with exit_on(Exception, f"the chat template of {directory} cannot be read"):
        template = compile_template(source)
    tokenizer = Tokenizer(directory, bpe, pattern, named, template)
    for token in tokenizer.stops:
        with exit_on(Exception, f"{path} is not a readable tokenizer"):
            is_token = tokenizer.encode([token]) == [[bpe.token_to_id(token)]]
        check(
            is_token,
            f"{path} has no token {token!r} to end an answer; name another as eos_token in "
            "tokenizer_config.json",
        )
    if "strftime_now" in source:
        say(f"the chat template of {directory} writes today's date: prompts change from day to day")
    return tokenizer


def conversion(auto_class: str, source: str, directory: str) -> str:
    """Returns a command that loads a model or tokenizer with a class of transformers, and saves it
    in the usual format. source: the arguments of from_pretrained."""
    load = f"from transformers import {auto_class} as M; M.from_pretrained({source})"
    return f"""python -c '{load}.save_pretrained("{directory}")'"""


def read_bpe(directory: str) -> tokenizers.Tokenizer:
    """The tokenizer in tokenizer.json. Raises an error if it cannot be read."""
    bpe = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
    # The file may turn truncation and padding on, for other uses.
    bpe.no_truncation()
    bpe.no_padding()
    return bpe


def read_config(directory: str) -> dict:
    """The content of tokenizer_config.json, or {} if there is none. Raises CheckpointError."""
    return files.read_optional_json(f"{directory}/tokenizer_config.json")


def named_tokens(directory: str) -> dict[str, str]:
    """{"eos_token": its text, ...} of a directory. Raises CheckpointError."""
    # transformers writes these names to either file, or to both.
    special_tokens = files.read_optional_json(f"{directory}/special_tokens_map.json")
    named = {}
    for config in (special_tokens, read_config(directory)):
        for name in TOKEN_NAMES:
            token = config.get(name)
            # A token is its text, or a dict with its text and its options.
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                named[name] = text
    return named


# ---------------------------------------------------------------- the chat template
def template_of(directory: str) -> str | None:
    """The source of the chat template of a directory; None if it has none. Exits with code 2 if it
    has several and none is the default."""
    path = f"{directory}/chat_template.jinja"
    if os.path.isfile(path):
        with exit_on(Exception, f"{path} cannot be read"), open(path, encoding="utf-8") as f:
            return f.read()
    found = read_config(directory).get("chat_template")
    # There may be several templates, with names.
    if isinstance(found, list):
        path = f"{directory}/tokenizer_config.json"
        with exit_on(Exception, f"chat_template in {path} is not a list of named templates"):
            found = {named["name"]: named["template"] for named in found}
    if isinstance(found, dict):
        names = ", ".join(map(str, found))
        found = found.get("default")
        check(
            found is not None,
            f"{directory} has the chat templates {names}, and no default; write the one to use "
            "as chat_template.jinja",
        )
    return found


def default_template(directory: str) -> str:
    """The source of the template of a directory that has none: ChatML, after the bos token if the
    tokenizer itself begins a text with it, as Llama's does. Raises an error if the tokenizer cannot
    be read."""
    bos = named_tokens(directory).get("bos_token")
    first_tokens = read_bpe(directory).encode("1").tokens[:1]
    return "{{ bos_token }}" + CHAT_TEMPLATE if first_tokens == [bos] else CHAT_TEMPLATE


class Generation(jinja2.ext.Extension):
    """Support for the block {% generation %}, with which some templates mark the assistant's text.
    The block renders as its content."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template so that it renders as it does in transformers' `apply_chat_template`.

    A template comes from whoever published the model. jinja2's sandbox lets a template use nothing
    but the values that it is given. Raises jinja2.TemplateError.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own tojson escapes HTML.
    options = dict(ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
    return json.dumps(value, separators=separators, **options)


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
