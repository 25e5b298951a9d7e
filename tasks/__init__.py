"""RULER-style tasks: haystacks and the builders of samples."""
