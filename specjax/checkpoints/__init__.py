"""Models in files: found, read and written; tokenizers; pairs of target and drafts."""
