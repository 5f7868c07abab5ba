"""Protected training: sealed data, attestation, gated key release, evidence, and cleanup (the extra `protect`)."""
