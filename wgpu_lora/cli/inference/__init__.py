"""Commands that let a model answer."""
