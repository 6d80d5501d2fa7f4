"""From op lists to a policy: which op of torch has which rule, here and in each part of a model."""
