"""Golden curves: what every strategy and every placement computes, to the bit; a refactoring leaves them alone."""
