"""Every model type of transformers as a reference: small random models, their proofs, and the page of verdicts."""
