"""Trainers of others on the engine. Each module imports the library that it is named after."""
