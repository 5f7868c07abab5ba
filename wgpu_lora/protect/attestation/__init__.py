"""Claims about this machine and its software, and a TPM's quote of them."""
