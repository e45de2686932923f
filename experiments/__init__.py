"""One thin script per job: parse the config, wire the packages, run. No numerics here."""
