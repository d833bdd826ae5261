"""Models of which only the first layers stay in memory: `--offload disk` and `--offload host`."""
