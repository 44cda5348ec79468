"""The rollout worker, and groups of them."""
