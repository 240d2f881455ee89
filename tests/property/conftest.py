"""Property tests are about results, not about time, and the same on every run."""

from hypothesis import settings

settings.register_profile("isochunk", deadline=None, derandomize=True)
settings.load_profile("isochunk")
