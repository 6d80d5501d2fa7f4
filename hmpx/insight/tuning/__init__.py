"""`hmpx.tune`: op lists that a model's own runs ask for, by what each op's rounding does and what its speed brings."""
