"""Tokenizers of other people: tokenizer.json read and checked, and the library that runs it kept in a child.

document -> components, patterns, charsmap    what a tokenizer.json may say
backend, child, process                       the library behind one interface, here or in a child with limits
"""
