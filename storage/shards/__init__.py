"""The shard format: schema, names, writer."""
