"""``python -m fathom_eval.lm_eval``: lm-eval's command line with ``--model fathom`` and the tasks of this package."""

from __future__ import annotations

import sys
from itertools import pairwise

from fathom_eval.errors import UserError


def main() -> int:
    """Run lm-eval's command line and return an exit code: 0 done, 2 bad input."""
    try:
        from fathom_eval.lm_eval.compat import register, require_lm_eval, unknown_task_message, unknown_tasks

        require_lm_eval()
        register()
        sys.argv = [*sys.argv[:1], *with_include_path(sys.argv[1:])]
        from lm_eval.__main__ import cli_evaluate

        try:
            cli_evaluate()
        except ValueError as error:
            names = unknown_tasks(error)
            if not names:
                raise
            raise UserError(unknown_task_message(names, _include_paths(sys.argv[1:]))) from None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def with_include_path(arguments: list[str]) -> list[str]:
    """The arguments with this package's tasks in them, unless another folder is given: lm-eval's command line takes one."""
    from fathom_eval.tasks.lm_eval import PATH

    is_run = len(arguments) > 1 and (arguments[0] == "run" or arguments[0].startswith("-"))
    is_given = any(argument.split("=")[0] == "--include_path" for argument in arguments)
    return [*arguments, "--include_path", str(PATH)] if is_run and not is_given else arguments


def _include_paths(arguments: list[str]) -> list[str]:
    """The folders after ``--include_path``, in either form."""
    joined = [argument.split("=", 1)[1] for argument in arguments if argument.startswith("--include_path=")]
    return joined + [after for option, after in pairwise(arguments) if option == "--include_path"]


if __name__ == "__main__":
    sys.exit(main())
