"""The numbers of `hmpx.rounding`, one implementation a backend; every one gives the same bits."""
