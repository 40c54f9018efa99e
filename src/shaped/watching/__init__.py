"""Is this run about to die? The quantities of `shaped.diagnose` while a model trains, and alarms."""
