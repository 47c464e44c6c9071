"""Rank 1.

Values per hop, ports, errors, and the stages before and after the engine. Sans-I/O; imports only `filters`.
"""
