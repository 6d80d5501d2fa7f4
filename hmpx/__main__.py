"""The shell commands: ``python -m hmpx ops|check|explain``."""

from __future__ import annotations

import argparse
import sys

from hmpx.errors import HmpxError
from hmpx.explain import check_files, explain_op, ops_table
from hmpx.oplist import read_lists
from hmpx.policy import OPT_LEVELS, Policy, build_policy


def _policy_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--list", "--bf16", metavar="FILE", help="the BF16 list as text, or YAML or JSON with several")
    command.add_argument("--fp32", metavar="FILE", help="the FP32 list as text")
    command.add_argument("--promote", metavar="FILE", help="the promote list as text")
    command.add_argument("--opt-level", choices=OPT_LEVELS, default="O1")


def _policy(options: argparse.Namespace) -> Policy:
    return build_policy(options.opt_level, read_lists(options.list, options.fp32, options.promote))


def _ops(options: argparse.Namespace) -> int:
    print(ops_table(_policy(options), options.containing))
    return 0


def _explain(options: argparse.Namespace) -> int:
    print(explain_op(options.op, _policy(options)))
    return 0


def _check(options: argparse.Namespace) -> int:
    problems = list(check_files(options.files))
    for problem in problems:
        print(problem)
    plural = "" if len(problems) == 1 else "s"
    print(f"{len(options.files)} checked, {len(problems)} problem{plural}")
    return 1 if problems else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hmpx", description="Read and check the precision of torch's ops.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ops = commands.add_parser("ops", help="each op that hmpx knows, its rule and its entry points")
    ops.add_argument("containing", nargs="?", default="", help="only ops with this in their name")
    _policy_options(ops)
    ops.set_defaults(run=_ops)

    check = commands.add_parser("check", help="lint op list files")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.set_defaults(run=_check)

    explain = commands.add_parser("explain", help="which entry points an op has, which rule, and why")
    explain.add_argument("op")
    _policy_options(explain)
    explain.set_defaults(run=_explain)

    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except HmpxError as error:
        print(f"hmpx: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
