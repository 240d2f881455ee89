"""Prefill–decode deployments."""
