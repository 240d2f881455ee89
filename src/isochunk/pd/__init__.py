"""Prefill/decode deployments: topology file, launcher, router, and KV transfer."""
