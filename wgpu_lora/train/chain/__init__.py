"""Chains: stages from data to an uploaded model, from a TOML file, each of which runs when its inputs have changed."""
