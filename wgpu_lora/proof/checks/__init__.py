"""The checks of a proof, numbered as in `proof.run.CHECKS`."""
