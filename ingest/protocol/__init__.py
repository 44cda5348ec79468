"""The wire protocol: messages, errors, names."""
