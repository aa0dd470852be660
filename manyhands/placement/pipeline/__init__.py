"""Pipeline stages: schedules as data, cutting a model, and running its stages."""
