"""What recovery costs while nothing fails: a step with `with step:` against the same step under plain torch."""
