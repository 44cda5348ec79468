"""The collector: journal, sealing, recovery, quotas."""
