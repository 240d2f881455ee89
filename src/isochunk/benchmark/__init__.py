"""``isochunk bench``: chunk policies against each other on the real engine."""
