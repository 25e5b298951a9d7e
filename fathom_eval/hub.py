"""Whether the model hub can be reached, found out in seconds: its clients retry for much longer."""

from __future__ import annotations

import threading

PATIENCE_SECONDS = 2.0
"""How long an answer is waited for."""


def hub_answers(patience: float = PATIENCE_SECONDS) -> bool:
    """Whether the hub answers anything, be it a refusal. False in the hub's offline mode."""
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=patience)
        except Exception:  # whatever keeps the hub from answering, the answer is no
            return
        answered.set()

    # In a thread, since name resolution and proxies ignore the request's own time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return answered.is_set()
