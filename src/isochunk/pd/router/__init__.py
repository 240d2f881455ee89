"""The router in front of prefill and decode servers: ``app.create_app``."""
