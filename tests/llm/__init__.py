"""Tests of language-model policies, clients and judges, all against loopback servers."""
