"""Networks: maths only. No distributed code, no random numbers in forward."""
