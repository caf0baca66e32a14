"""Pipeline orders as data: who computes what, in which order, and how long that takes."""
