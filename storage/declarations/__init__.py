"""What is declared of a policy: spaces, rules."""
