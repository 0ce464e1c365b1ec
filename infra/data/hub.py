"""Access to the Hugging Face hub, always through `ask`, which retries.

The hub may fail for a moment (503, a dropped connection) or ask for fewer requests (429). Neither
may end a run of many hosts, and the hosts must not all send requests at once. `ask` does not retry
if something does not exist or this user may not read it (401, 403, 404).
"""

import contextlib
import email.utils
import fcntl
import functools
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from infra.data.tiny import make_tiny
from infra.host.console import exit_on, first_line, say, warn
from infra.host.processes import together

# Seconds to wait before each retry; up to twice as long in a run of many processes. Together, the
# waits are longer than five minutes, the window over which the hub counts requests.
PATIENCE = (5, 10, 20, 40, 80, 160)
# If the hub asks for a longer wait, the retry waits that long, but at most LONGEST_WAIT seconds.
LONGEST_WAIT = 600
# The processes of a run send their first requests APART seconds apart, or closer together if there
# are many: the last one sends its first request within SPREAD seconds.
APART = 0.5
SPREAD = 30
# What to do if the hub answers 401 or 403.
LOGIN = "accept its licence on the hub, if it has one, and put HF_TOKEN=... into .env"


class HubError(OSError):
    """The hub did not serve a request, even after all retries."""


def ask(what: str, call: Callable[[], Any], failure: str) -> Any:
    """Returns the result of call(), a request to the hub. what: the request's name in messages.

    Retries after faults of the hub. Exits with code 2 and the message `failure` if the hub refuses
    the request, or if all retries fail and there is no local copy. Import the libraries that access
    the hub in call(): they read HF_HUB_OFFLINE at import, and `reach`, called first, may set it.
    """
    no_answer = reach()
    with exit_on(Exception, f"{failure}{no_answer}"), first_on_this_disk(what):
        for seconds in (*PATIENCE, None):
            try:
                return call()
            except Exception as e:
                found = fault(e)
                if not found:
                    response = getattr(e, "response", None)
                    is_refused = getattr(response, "status_code", None) in (401, 403)
                    # `datasets` keeps only the text of such an error.
                    if is_refused or "gated dataset" in str(e):
                        raise HubError(f"{first_line(e)}; {LOGIN}") from e
                    raise
                reason, asked_seconds = found
                if seconds is None:
                    tries = 1 + len(PATIENCE)
                    raise HubError(f"{reason}, after {tries} tries") from e
            # Processes that failed at the same time wait for different times.
            share = jax.process_index() / jax.process_count()
            pause = max(seconds, min(asked_seconds, LONGEST_WAIT)) + seconds * share
            warn(f"{reason} for {what}; trying again in {pause:.0f} s")
            time.sleep(pause)


# ---------------------------------------------------------------- what went wrong
def fault(error: BaseException) -> tuple[str, float] | None:
    """Returns (what the hub did, seconds that it asks to wait), or None if a retry would not help.

    Libraries wrap a connection's errors in errors of their own, so this follows the chain of causes
    to the first error that shows what happened.
    """
    if is_offline():
        return None
    # Import this alias: huggingface_hub uses the package httpx or httpx2, depending on its version.
    from huggingface_hub.utils import httpx

    broken = (
        ConnectionError,
        TimeoutError,
        httpx.NetworkError,
        httpx.ProxyError,
        httpx.RemoteProtocolError,
        httpx.TimeoutException,
    )
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status is not None:
            if status not in (408, 429) and status < 500:
                return None
            reason = f"the hub answers {status} {response.reason_phrase}"
            return reason, seconds_asked(response.headers)
        if isinstance(error, broken):
            # A certificate that is not trusted now will not be trusted later.
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return None
            return f"the hub drops the connection ({first_line(error)})", 0
        # Large files come from a store, through a library whose errors differ only in their text.
        if "CAS Client Error" in str(error):
            return f"the hub's store fails ({first_line(error)})", 0
        error = error.__cause__ or error.__context__
    return None


def seconds_asked(headers: Mapping[str, str]) -> float:
    """The seconds that a response asks to wait, or 0 if it does not ask.

    The wait is in Retry-After, as a number or a date, or in the hub's own header `RateLimit:
    "api";r=0;t=55`, where r=0 means that no requests remain.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return int(text)
    # For text that is not a date, some versions of Python raise TypeError.
    with contextlib.suppress(ValueError, TypeError):
        return max(0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    used_up = re.search(r"\br=0\b.*?\bt=(\d+)", headers.get("RateLimit", ""))
    return int(used_up[1]) if used_up else 0


# ---------------------------------------------------------------- the order of requests
def seconds_until_first(index: int, count: int) -> float:
    """Seconds that process `index` of `count` waits before its first request to the hub."""
    return index * min(APART, SPREAD / count)


@contextlib.contextmanager
def first_on_this_disk(what: str) -> Iterator[None]:
    """Let only the first of the processes that share a disk request `what`. The others wait until
    the first has finished or failed, and then go on together. If it finished, they find its copy.

    The lock is the kernel's file lock, which works for any number of processes, and also on disks
    that hosts share. It ends with its holder, so nobody waits for a dead process.
    """
    from huggingface_hub import constants

    path = f"{constants.HF_HUB_CACHE}/.locks/podgrpo--{re.sub(r'[^A-Za-z0-9.-]', '--', what)}.lock"
    with contextlib.ExitStack() as held:
        # If the disk cannot be written or locked, continue without the lock: either the copies are
        # already there, or each process sends its own request.
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = held.enter_context(open(path, "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process here is asking the hub for {what}; waiting for its copy")
                fcntl.flock(file, fcntl.LOCK_SH)
        yield


# ---------------------------------------------------------------- whether the hub can be reached
def is_offline() -> bool:
    """Whether the hub's libraries are set to use only their local copies."""
    settings = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in settings)


@functools.cache
def reach() -> str:
    """Find out once per process whether the hub can be reached, unless its libraries are set
    offline. Returns "", or why it cannot be reached, for the end of a message.

    If the hub cannot be reached, its libraries are set to use their local copies: otherwise each of
    their requests would retry for half a minute. They read the setting at import, so call this
    before importing them. The hub counts as reachable if it accepts the connection, whatever it
    responds.
    """
    if is_offline():
        return ""
    # This is the first request of a process, so wait here to spread the hosts' first requests.
    if seconds := seconds_until_first(jax.process_index(), jax.process_count()):
        time.sleep(seconds)
    reason = fault_of_connection()
    # If one process of several fails, the whole run ends, so try again: the fault may be brief.
    patience = PATIENCE[:3] if jax.process_count() > 1 else ()
    for seconds in patience:
        if not reason:
            break
        warn(f"{reason}; trying again in {seconds} s; to use local copies, set HF_HUB_OFFLINE=1")
        time.sleep(seconds)
        reason = fault_of_connection()
    if not reason:
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return f"; {reason}, and there is no copy here"


def fault_of_connection() -> str:
    """Try to connect to the hub. Returns "", or why there is no connection."""
    # The hub's libraries can use SOCKS proxies, but urllib cannot, so it cannot test them.
    if any(url.startswith("socks") for url in urllib.request.getproxies().values()):
        return ""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        # This page may be missing, but the hub has responded.
        return ""
    # urllib raises URLError if it gets no connection, and ValueError if the URL is malformed.
    except (urllib.error.URLError, ValueError) as e:
        # The hub's libraries bring their own certificates, so they may be able to connect.
        if isinstance(getattr(e, "reason", None), ssl.SSLError):
            return ""
        return f"the hub cannot be reached ({e})"
    except (OSError, http.client.HTTPException):
        # The connection was dropped, or nothing came in time: `ask` will retry.
        return ""
    return ""


# ---------------------------------------------------------------- the model's files
def model_directory(cfg: Any, *patterns: str) -> str:
    """The directory of a model's files, for --model: tiny, a directory, or a hub id.

    Makes the tiny model if it is missing. For a hub id, downloads the files that match `patterns`.
    Exits with code 2 if there is no such model.
    """
    if cfg.model == "tiny":
        # Each process makes its own model, since processes may or may not share a disk.
        directory = f"{cfg.out}/tiny-seed{cfg.seed}.{jax.process_index()}"
        if not os.path.isdir(directory):
            make_tiny(directory, cfg.seed)
        return directory

    def download():
        # huggingface_hub comes with tokenizers, and is slow to import.
        from huggingface_hub import snapshot_download

        return snapshot_download(cfg.model, allow_patterns=patterns)

    missing = f"there is no directory {cfg.model} (for a plan, one with a config.json is enough)"
    # The directory may exist on some hosts and not on others.
    with together(f"model {cfg.model}"):
        if os.path.isdir(cfg.model):
            return cfg.model
        return ask(cfg.model, download, f"{missing}, and the hub cannot provide the model")
