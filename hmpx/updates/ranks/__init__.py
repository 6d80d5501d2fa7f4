"""Many ranks: what each holds of a parameter, and what all must agree on."""
