"""One hypothesis profile for all tests: how long an example takes says more about the machine than about us."""

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
