"""The client library: episodes, delivery, local and remote actions."""
