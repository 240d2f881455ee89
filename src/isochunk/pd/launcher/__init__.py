"""``isochunk up``: starts the processes of a deployment, watches them and takes them down."""
