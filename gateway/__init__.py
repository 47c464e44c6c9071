"""Rank 3. Command line, settings, HTTP edges, metrics, and the one place that wires objects (`app.py`)."""
