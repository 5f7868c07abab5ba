"""How the golden fixtures are made, with torch, transformers, PEFT and bitsandbytes. See tests/fixtures/README.md."""
