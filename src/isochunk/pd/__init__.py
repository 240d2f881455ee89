"""Prefill-decode deployments: topology file, launcher and router."""
