"""What a lack of memory looks like."""

from __future__ import annotations

import torch

# What allocators say that have no type of error of their own: the CPU's, the CUDA runtime's and cuBLAS'.
_MESSAGES = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the host or of a GPU, did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
