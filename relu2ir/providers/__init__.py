"""The providers, one file each. They know the IR and the registry's `Provider`, never one another."""
