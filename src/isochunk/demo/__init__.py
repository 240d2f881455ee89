"""The demonstration: real engine, embedded models, one page of results."""
