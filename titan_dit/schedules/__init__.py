"""Pipeline schedules as data: the order of each rank's actions, its proof and its simulation."""
