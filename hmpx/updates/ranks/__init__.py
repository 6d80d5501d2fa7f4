"""Several ranks: which part of a parameter each holds, and the facts that all must agree on."""
