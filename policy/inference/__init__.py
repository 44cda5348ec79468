"""Acting with numpy alone."""
