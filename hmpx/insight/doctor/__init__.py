"""`hmpx.doctor`: what is wrong with the precision of a training that nobody has chosen a recipe for."""
