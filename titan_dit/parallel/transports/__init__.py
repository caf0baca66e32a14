"""How streams travel between the ranks of a pipeline whose order is decided at run time.

base.py is what every rank uses; a way to travel is a file with a Sender and a Receiver.
"""
