"""OpenAI's API over HTTP: requests become an engine's, its tokens become text."""
