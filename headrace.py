"""Headrace's front door: one command line over ingest, policy and storage."""
