"""Language models: one client for servers, one for a model in process, scoring of given actions, judges.

Nothing is imported here, so that `audit --help` loads neither openai nor torch.
"""
