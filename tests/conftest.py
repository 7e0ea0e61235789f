"""Puts ``tests/`` on the import path, so that tests can ``from checkpoints import ...``, and sets
Hypothesis up for a shared machine: no deadline per example, since the first one may load a model.
"""

from hypothesis import settings

settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")
