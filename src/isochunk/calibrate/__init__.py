"""``isochunk calibrate``: warm-up prompts until a server has its latency model."""
