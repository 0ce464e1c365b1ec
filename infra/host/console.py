"""The terminal: lines from process 0, warnings from any process, the status, users' mistakes."""

import contextlib
import io
import os
import shutil
import sys
import unicodedata

import jax

# ---------------------------------------------------------------- the terminal
# These characters erase the terminal's current line, which may hold a status.
ERASE = "\r\033[K"
# Lines on stderr start with this name: train.py, or the tool that runs.
PROGRAM = os.path.basename(sys.argv[0])


def warn(text: str) -> None:
    """Print a line on stderr, from any process."""
    erase = ERASE if sys.stderr.isatty() else ""
    print(f"{erase}{PROGRAM}: {text}", file=sys.stderr, flush=True)


def say(text: str, end: str = "\n") -> None:
    """Print on stdout, from process 0 only."""
    if jax.process_index() == 0:
        erase = ERASE if sys.stdout.isatty() else ""
        print(erase + text, end=end, flush=True)


def show_status(text: str) -> None:
    """Print a line that the next printed line replaces. Does nothing without a terminal."""
    if sys.stdout.isatty():
        # Cut the text to the terminal's width: nothing would erase a second line.
        columns = shutil.get_terminal_size().columns
        say(text[: columns - 1], end="\r")


def erase_status() -> None:
    """Erase the status line, so that something else can print. May be called at any time."""
    # Do not use `say`, which asks JAX for the process index: JAX may not know it yet.
    if streams_are_open() and sys.stdout.isatty():
        print(ERASE, end="", flush=True)


def progress(what: str, done: int, total: int) -> None:
    """Print progress: a status on a terminal, otherwise a line at each quarter of the total."""
    what += f" {done}/{total}"
    show_status(what)
    if not sys.stdout.isatty() and total > 1:
        quarter = done * 4 // total
        quarter_before = (done - 1) * 4 // total
        if quarter > quarter_before:
            say(what)


# ---------------------------------------------------------------- mistakes
def check(condition, message: str) -> None:
    """Print one line and exit with code 2 unless the condition holds. For users' mistakes."""
    if not condition:
        warn(message.replace("\n", " "))
        raise SystemExit(2)


@contextlib.contextmanager
def exit_on(errors, message: str):
    """If one of these errors is raised in the context, or in the function that this decorates, exit
    like `check`, with the message and the error's first line."""
    try:
        yield
    except BaseException as e:
        # A panic in tokenizers, which is written in Rust, is not an Exception. Treat it as one of
        # `errors`.
        if not isinstance(e, errors) and type(e).__name__ != "PanicException":
            raise
        check(False, f"{message}: {first_line(e)}")


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    try:
        text = str(error)
    # A reward function may raise an error of its own class, whose str() fails.
    except Exception:
        text = "it does not say why"
    # Errors of libraries may have pages of text.
    text = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"


# Invisible characters that ordinary texts have: joiners, direction marks, soft hyphens.
INVISIBLE = "\u200c\u200d\u200e\u200f\xad"


def readable(text: str) -> str:
    """Replace control characters, which a model may sample and a terminal would obey."""
    lines = text.replace("\r\n", "\n").expandtabs(4).split("\n")
    # Few lines have such characters, and replacing them is slow.
    return "\n".join(line if line.isprintable() else readable_line(line) for line in lines)


def readable_line(line: str) -> str:
    """Replace the control characters of a line. Unusual spaces, such as the ideographic space,
    are not printable to Python either, but stay."""
    return "".join(
        c
        if c.isprintable() or c in INVISIBLE or unicodedata.category(c) == "Zs"
        else "\N{REPLACEMENT CHARACTER}"
        for c in line
    )


# ---------------------------------------------------------------- standard streams
class Stream(io.FileIO):
    """A standard stream that ignores errors: its reader may be gone, or its disk full."""

    def write(self, data):
        with contextlib.suppress(OSError):
            # FileIO.write returns None if another program has made this stream non-blocking, and
            # its reader is slow.
            return super().write(data) or len(data)
        return len(data)


def streams_are_open() -> bool:
    """Whether stdout and stderr can be printed to."""
    try:
        # If descriptor 1 or 2 is closed, the next file to be opened gets its number. Anything
        # printed would then go into that file.
        for number in (1, 2):
            os.fstat(number)
        return not (sys.stdout.closed or sys.stderr.closed)
    # AttributeError if sys.stdout is None.
    except (OSError, AttributeError):
        return False


def open_streams() -> None:
    """Open sys.stdout and sys.stderr again. If a descriptor is closed, print to nowhere."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        try:
            raw = Stream(number, "w", closefd=False)
        except OSError:
            raw = io.FileIO(os.devnull, "w")
        # The terminal's encoding may lack some characters of an answer.
        text = io.TextIOWrapper(
            io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, text)
