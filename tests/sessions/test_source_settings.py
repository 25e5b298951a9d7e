"""The arguments that say where sessions come from, as the command and the benchmark read them."""

from __future__ import annotations

import argparse

from fathom_eval.cli import build_parser
from fathom_eval.commands.sessions_inspect import add_reading_arguments, add_rendering_arguments, source_settings
from fathom_eval.session_data import SourceSettings

GIVEN = ["--format=openhands-v1", "--repo=owner/project", "--default-repo=owner/other", "--condensation=condensed", "--seed=3"]


def test_every_argument_reaches_the_source() -> None:
    expected = SourceSettings("set.jsonl", "plain", 2, 500, 900, 3, "openhands-v1", "owner/project", "owner/other", "condensed", "main")
    args = build_parser().parse_args(["sessions", "--trajectories=set.jsonl", "--plain", *GIVEN])
    assert source_settings(args, 2, 500, 900, "main") == expected
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories")
    parser.add_argument("--seed", type=int, default=0)
    add_reading_arguments(parser)
    add_rendering_arguments(parser, "the template")
    assert source_settings(parser.parse_args([]), 1, 500, 900) == SourceSettings(None, "auto", 1, 500, 900)
