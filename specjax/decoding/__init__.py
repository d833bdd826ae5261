"""The loop over draft, score, verify and commit: `generate` and `stream`."""
