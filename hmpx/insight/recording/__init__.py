"""`hmpx.record`: which op ran in which precision, where, why, and at what price."""
