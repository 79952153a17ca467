"""Credit signals: what claims to know which steps mattered. Knows decision points; imports audit.records only."""
