"""The hub of models and data sets: every access to it goes through `ask`, which asks again.

A service fails for a moment (503, a dropped connection) or asks for fewer requests (429), and a
run of many hosts must not end of it, nor have all of them ask at once. What is not there, or not
for this user (401, 403, 404), is not asked for again.
"""

import contextlib
import email.utils
import fcntl
import functools
import http
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from infra.log import exit_on, first_line, say, warn

# Seconds to wait before each further try, and up to twice as many in a run of many processes. The
# hub counts requests over windows of five minutes.
PATIENCE = (5, 10, 20, 40, 80, 160)
# The hub may ask to wait for longer than the patience has, but for no more seconds than this.
LONGEST_WAIT = 600
# The processes of a run begin to ask so many seconds apart, and the last of them after SPREAD.
APART = 0.5
SPREAD = 30


class HubError(OSError):
    """The hub has not served a request, however patiently it was asked."""


def ask(what: str, call: Callable[[], Any], failure: str) -> Any:
    """What call() returns, which asks the hub for `what`: a name, for messages.

    Faults of the hub are waited for. Stops, with exit code 2 and the message `failure`, where the
    hub refuses, or does not serve what no copy here has. Libraries that ask the hub have to be
    imported in call(), since `reach` may set them to use their copies.
    """
    no_answer = reach()
    with exit_on(Exception, f"{failure}{no_answer}"), first_on_this_disk(what):
        for seconds in (*PATIENCE, None):
            try:
                return call()
            except Exception as e:
                found = fault(e)
                if not found:
                    raise
                reason, asked_seconds = found
                if seconds is None:
                    tries = 1 + len(PATIENCE)
                    raise HubError(f"{reason}, after {tries} tries") from e
            # Processes that failed together do not ask again together.
            pause = max(seconds, min(asked_seconds, LONGEST_WAIT)) + seconds * place_among_all()
            warn(f"{reason} for {what}; trying again in {pause:.0f} s")
            time.sleep(pause)


# ---------------------------------------------------------------- what went wrong
def fault(error: BaseException) -> tuple[str, float] | None:
    """-> (what the hub did, the seconds that it asks to wait), or None if no waiting mends this.

    Libraries raise errors of their own on those of the connection: the first that says decides.
    """
    if is_offline():
        return None
    # The HTTP library of huggingface_hub, whose name differs by version.
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
            return f"the hub answers {status} {phrase(status)}", seconds_asked(response.headers)
        if isinstance(error, broken):
            # A certificate that is not trusted will not be trusted later.
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return None
            return f"the hub breaks off ({first_line(error)})", 0
        # The store of large files is served by a library whose errors only their text tells apart.
        if "CAS Client Error" in str(error):
            return f"the hub's store breaks off ({first_line(error)})", 0
        error = error.__cause__ or error.__context__
    return None


def phrase(status: int) -> str:
    """The usual words for a status of HTTP, or "" if it has none."""
    with contextlib.suppress(ValueError):
        return http.HTTPStatus(status).phrase
    return ""


def seconds_asked(headers: Mapping[str, str]) -> float:
    """The seconds that an answer asks to wait: by Retry-After, a number or a date, or, if no
    requests remain, by the hub's own `RateLimit: "api";r=0;t=55`. 0 if it does not ask."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return int(text)
    # A text that is no date is a TypeError in some versions of Python.
    with contextlib.suppress(ValueError, TypeError):
        return max(0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    used_up = re.search(r"\br=0\b.*?\bt=(\d+)", headers.get("RateLimit", ""))
    return int(used_up[1]) if used_up else 0


# ---------------------------------------------------------------- who asks when
def place_among_all() -> float:
    """0 for process 0, up to nearly 1 for the last process of the run."""
    return jax.process_index() / jax.process_count()


def seconds_until_first(index: int, count: int) -> float:
    """How long process `index` of `count` waits before it asks the hub for the first time."""
    return index * min(APART, SPREAD / count)


@contextlib.contextmanager
def first_on_this_disk(what: str) -> Iterator[None]:
    """Of all processes that share a disk of copies, the first one asks for `what` alone; the others
    wait until it has ended, well or not, and then all go on at once: they find the copy.

    A lock of the kernel needs no count of processes per host, holds on disks that hosts share, and
    ends with the process that has it: nobody waits for a process that is gone.
    """
    from huggingface_hub import constants

    path = f"{constants.HF_HUB_CACHE}/.locks/podgrpo--{re.sub(r'[^A-Za-z0-9.-]', '--', what)}.lock"
    with contextlib.ExitStack() as held:
        # A disk that cannot be written or locked has copies, or each process asks for itself.
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = held.enter_context(open(path, "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process here asks the hub for {what}; waiting for the copy")
                fcntl.flock(file, fcntl.LOCK_SH)
        yield


# ---------------------------------------------------------------- is there a hub
def is_offline() -> bool:
    """Whether the hub's libraries are set to use the copies that they keep, and not to ask."""
    settings = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in settings)


@functools.cache
def reach() -> str:
    """Connect to the hub, once in a process -> "", or why it cannot be reached.

    If it cannot be reached, its libraries are set to use the copies that they keep: they would ask
    for half a minute. They read that setting when they are imported, so call this before. A hub
    that takes the connection is there, whatever it answers.
    """
    if is_offline():
        return ""
    # The first request of all, so that the hosts' first requests are spread in time.
    if seconds := seconds_until_first(jax.process_index(), jax.process_count()):
        time.sleep(seconds)
    # Other proxies than the hub's libraries, urllib has none of this kind.
    if any(url.startswith("socks") for url in urllib.request.getproxies().values()):
        return ""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        # That page may be missing, but the hub has answered.
        return ""
    # URLError is what urllib raises before it has a connection, ValueError for no address.
    except (urllib.error.URLError, ValueError) as e:
        # The hub's libraries have certificates of their own.
        if isinstance(getattr(e, "reason", None), ssl.SSLError):
            return ""
        os.environ["HF_HUB_OFFLINE"] = "1"
        return f"; the hub gives no answer ({e}), and there is no copy here"
    except (OSError, http.client.HTTPException):
        # The connection was dropped, or nothing came in time: `ask` will ask again.
        return ""
    return ""
