"""Untrusted tokenizers: validation of tokenizer.json, and the library that runs it in a child process.

document -> components, patterns, charsmap    validation of a tokenizer.json
backend, child, process                       the library behind one interface, here or in a child with limits
"""
