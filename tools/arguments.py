"""The command lines of the tools."""

import argparse

from infra.host.console import check


def parser_of(description: str, flags: dict | None = None) -> argparse.ArgumentParser:
    """Returns a parser that prints one line for a mistake, and exits with code 2.

    flags: {name: default}. A flag has the type of its default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    # By default, argparse would print the usage, too.
    parser.error = lambda message: check(False, f"{message}; see --help")
    for name, default in (flags or {}).items():
        help_text = f"default {default!r}"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=help_text)
    return parser


def check_is_here(out: str) -> None:
    """Exit with code 2 if a run's directory is in a bucket, which these tools do not read."""
    copy = f"mkdir run; gcloud storage cp '{out.rstrip('/')}/*.json*' run"
    check(not out.startswith("gs://"), f"{out} is in a bucket; copy its small files: {copy}")


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Exit with code 2 if one of these flags is below `least`."""
    for name in names:
        value = getattr(args, name)
        check(value >= least, f"{name} = {value} must be {least} or more")
