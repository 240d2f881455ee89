"""Moving a prompt's KV blocks from every rank of a prefill instance to a decode instance.

Engine-agnostic: an engine gives callables that read and write its cache. The decode instance
registers its blocks with every prefill rank; each rank then pushes its own layers.
"""
