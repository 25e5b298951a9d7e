"""One module a command. Each has ``HELP``, ``EXAMPLE``, ``add_arguments(parser)`` and ``run(args) -> int``.

Modules here import nothing heavy at the top: ``--help`` must answer at once.
"""
