"""Pipeline schedules as data: built by name, checked, timed and simulated before they run."""
