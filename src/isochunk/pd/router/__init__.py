"""The router in front of prefill and decode servers."""

from isochunk.pd.router.app import create_app
from isochunk.pd.router.settings import Address, RouterSettings

__all__ = ["Address", "RouterSettings", "create_app"]
