"""Rank 0. Rules, folding, the automaton, whole-text scan and the streaming filter. Sans-I/O; imports nothing
of ours.
"""
