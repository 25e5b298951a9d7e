"""Run the interpreter's cases: a JSON line for each with its name, seconds and error. Arguments choose cases by a part of their name."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

import torch

from kernel_checks import CHECKS, case_name

if os.environ.get("TRITON_INTERPRET") != "1":
    raise SystemExit("needs TRITON_INTERPRET=1")
torch.set_num_threads(1)
for name, (function, small, _) in CHECKS.items():
    for case in small:
        label = case_name(name, case)
        if sys.argv[1:] and not any(part in label for part in sys.argv[1:]):
            continue
        started, error = time.perf_counter(), ""
        try:
            function("cpu", **case)
        except Exception:
            error = traceback.format_exc(limit=4)
        print(json.dumps({"name": label, "seconds": round(time.perf_counter() - started, 2), "error": error}), flush=True)
