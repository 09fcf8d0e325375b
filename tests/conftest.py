"""Two hypothesis profiles: ``thorough`` of ``make test``, and ``quick`` for tests that name no number of examples.

How long an example takes says more about the machine than about us, so neither has a deadline.
"""

from hypothesis import HealthCheck, settings

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", patient, max_examples=20)
settings.register_profile("thorough", patient, max_examples=100)
settings.load_profile("quick")
