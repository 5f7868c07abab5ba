"""The golden fixtures of the tests, made with torch, transformers, PEFT, TRL, bitsandbytes and swtpm."""
