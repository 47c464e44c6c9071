"""Rank 2. The link, the workers (vLLM and scripted), the pool, and the embedded model."""
