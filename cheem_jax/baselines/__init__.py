"""The methods that CHEEM is compared with."""
