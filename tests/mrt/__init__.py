"""Tests of the estimators of micro-randomised trials; `dgp` simulates trials whose truth is exact."""
