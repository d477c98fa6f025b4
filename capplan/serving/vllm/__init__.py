"""Rules of scheduling and adapter caching of vLLM."""
