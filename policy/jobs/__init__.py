"""Freeze, train, evaluate, publish: one run each."""
